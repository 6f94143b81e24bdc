"""A tiny target, and heads trained for it, which all workers share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specrt.exporter.heads.config import HeadConfig
from specrt.exporter.heads.module import Head
from tests.exporter.heads.making import random_head, tiny_target, train
from tests.exports import Exports, made_once


@pytest.fixture(scope="session")
def target() -> Any:
    return tiny_target()


@pytest.fixture(scope="session")
def trained(exports: Exports, target: Any) -> Callable[[str, HeadConfig, int], Head]:
    """(name, config, steps of training) -> head; trained once for each name."""

    def make(name: str, config: HeadConfig, num_steps: int) -> Head:
        head = random_head(config, target)

        def make_file(folder: Path) -> None:
            train(head, target, num_steps)
            folder.mkdir(exist_ok=True)
            torch.save(head.state_dict(), folder / "head.pt")

        place = made_once(exports.folder / f"head-{name}", make_file)
        head.load_state_dict(torch.load(place / "head.pt", weights_only=True))
        return head

    return make
