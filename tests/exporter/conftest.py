"""Fixtures of several files of the exporter's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exporter.tiny_pair import CHUNK, MAX_SEQ_LEN, K, save_models
from tests.exporter.tracing.traces import Traces
from tests.exports import Exports, made_once


@pytest.fixture(scope="session")
def models(exports: Exports) -> dict[str, Path]:
    """A tiny target and its draft, by role; read-only."""
    place = made_once(exports.folder / "pair", save_models)
    return {role: place / role for role in ("target", "draft")}


@pytest.fixture(scope="session")
def traces(exports: Exports) -> Traces:
    """Graphs of tiny models that all workers share; each call gives a new object."""
    return Traces(exports)


@pytest.fixture(scope="session")
def pair(exports: Exports, models: dict[str, Path]) -> Path:
    """The bundle of both; read-only."""
    return exports.bundle(models["target"], str(models["draft"]), K, max_seq_len=MAX_SEQ_LEN, prefill_chunk=CHUNK)
