"""A backend of tables for the tests of whole runtimes, and bundles opened on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from specrt.engines import backends
from specrt.engines.interface import CPU
from specrt.runtime.runtime import Runtime, load
from tests.runtime.support.bundles import DRAFT, TABLE, Backend, Open, write_bundle


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Backend:
    """Its tables and sizes may be changed before a bundle is opened."""
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
    backend = Backend()
    monkeypatch.setitem(backends.BACKENDS, "fake", {CPU: backend.open})
    return backend


@pytest.fixture
def open_bundle(tmp_path: Path, backend: Backend) -> Iterator[Open]:
    """A new bundle for each call, closed at the end."""
    opened: list[Runtime] = []

    def make(draft: str = "model", eos: Sequence[int] = (), ending: str = "", **defaults: float) -> Runtime:
        opened.append(load(write_bundle(tmp_path / str(len(opened)), draft, eos, ending, backend, **defaults)))
        return opened[-1]

    yield make
    for runtime in opened:
        runtime.close()


@pytest.fixture
def models(backend: Backend) -> Backend:
    """Tables of logits, which sampling needs."""
    backend.target, backend.draft = TABLE, DRAFT
    return backend


@pytest.fixture
def runtime(open_bundle: Open, models: Backend) -> Runtime:
    return open_bundle()
