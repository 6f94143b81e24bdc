"""Settings for every test: hypothesis' profile, and the reason why tests that need a GPU are skipped."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.exports import Exports

os.environ.setdefault("SPECRT_DEBUG", "1")  # a fault of ours shows its traceback, not one line

gc.set_threshold(2_000, 10, 200)  # else an export walks all objects about once

settings.register_profile("specrt", deadline=None, max_examples=30, derandomize=os.environ.get("CI") == "true")
settings.register_profile("thorough", deadline=None, max_examples=300)
settings.load_profile("specrt")

# A run in the background ignores these signals, and so would the commands that tests start and interrupt.
for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, default)


def has_nvidia_gpu() -> bool:
    """Whether the driver shows a GPU. Calls no CUDA library, so that no backend needs to be installed."""
    if Path("/dev/nvidia0").exists():
        return True
    if shutil.which("nvidia-smi") is None:
        return False
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listing.returncode == 0 and "GPU" in listing.stdout


def _place_in_the_run(item: pytest.Item) -> tuple[bool, bool, bool]:
    folders = item.path.relative_to(Path(__file__).parent).parts
    return item.get_closest_marker("model") is None, "terminal" not in folders, folders[0] == "runtime"


def pytest_collection_finish() -> None:
    """Modules and tests live as long as the run: the garbage collector is not to walk them."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # What takes long comes first, and the runtime's short files come last: a long one would leave a worker idle.
    items.sort(key=_place_in_the_run)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not has_nvidia_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; none found"))


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exports]:
    """Tiny models and bundles that all workers share. A test that changes one copies it first."""
    base = tmp_path_factory.getbasetemp()
    shared = Exports((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "exports")
    yield shared
    shared.check()


@pytest.fixture(scope="session")
def tiny_bundle(exports: Exports) -> Path:
    """A bundle of the tiny random Llama with itself as the draft, K = 4, context 512; next to it is its ``model``."""
    return exports.bundle(exports.model(), "self")


@pytest.fixture(scope="session")
def tiny_tensorrt_bundle(exports: Exports) -> Path:
    """A bundle of the tiny Llama in fp16 with its own draft for TensorRT, K = 3, context 96, without engines."""
    draft = exports.model(num_hidden_layers=1)
    return exports.bundle(exports.model(), str(draft), 3, max_seq_len=96, prefill_chunk=32, backend="tensorrt-rtx")
