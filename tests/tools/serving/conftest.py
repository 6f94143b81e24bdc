"""Servers that several test files talk to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from specrt.engines import backends
from specrt.engines.interface import CPU
from specrt.runtime.runtime import load
from specrt.serving.service import Config, Limits, Service
from tests.tools.serving.parrot import parrot_backend, write_parrot
from tests.tools.serving.serving import Served, serving


@pytest.fixture(scope="module")
def parrot_bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """See ``tests.tools.serving.parrot``. It can be opened while the module runs."""
    folder, backend = tmp_path_factory.mktemp("parrot"), parrot_backend()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECRT_CACHE", str(folder / "cache"))
        patch.setitem(backends.BACKENDS, "fake", {CPU: backend.open})
        yield write_parrot(folder / "bundle", backend)


@pytest.fixture(scope="module")
def served(parrot_bundle: Path) -> Iterator[Served]:
    """The parrot, served under the name ``parrot`` and the alias ``bird``."""
    config = Config(["parrot", "bird"], Limits(max_concurrency=4, queue_size=4, max_body_bytes=1 << 16))
    with serving(lambda: Service(load(parrot_bundle), config)) as server:
        yield server
