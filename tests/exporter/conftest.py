"""Fixtures of several files of the exporter's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exporter.tiny_pair import save_models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny target and its draft, by role; nobody changes them."""
    return save_models(tmp_path_factory.mktemp("models"))
