"""The modules ``tensorrt`` and ``tensorrt_rtx``: one interface, imported by backend's name when it is needed."""

from __future__ import annotations

import importlib
import importlib.util
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrt.engines.errors import BackendError, one_line


@dataclass(frozen=True)
class Library:
    """A module, its oldest version with KV cache updates and attention, and the newest one tested (major, minor).

    ``is_portable``: its engines may be built without a GPU, for compute capabilities that are named.
    """

    module: str
    install: str
    oldest: tuple[int, int]
    newest: tuple[int, int]
    is_portable: bool


LIBRARIES = {
    "tensorrt-rtx": Library("tensorrt_rtx", "pip install 'specrt[tensorrt-rtx]'", (1, 7), (1, 7), True),
    "tensorrt": Library("tensorrt", "pip install 'tensorrt>=10.15,<11.5'", (10, 15), (11, 4), False),
}

# The library's names of dtypes, and ours
DTYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT64": "int64", "INT32": "int32"}


def library_of(backend: str) -> Library:
    """The row of ``backend``. Raises ``BackendError`` for a backend that has no engines to build."""
    if backend not in LIBRARIES:
        raise BackendError(f"backend {backend}: nothing to build; engines are for {', '.join(LIBRARIES)}")
    return LIBRARIES[backend]


def load_library(backend: str) -> Any:
    """The imported module. Raises ``BackendError`` when it is missing, cannot be loaded, or is too old or too new."""
    library = library_of(backend)
    if importlib.util.find_spec(library.module) is None:
        raise BackendError(f"backend {backend}: {library.module} is not installed; {library.install}")
    try:
        module = importlib.import_module(library.module)
    except (ImportError, OSError) as error:  # the wheel is there, a shared library is not
        reason = one_line(error)
        raise BackendError(
            f"backend {backend}: {library.module} cannot be loaded ({reason}); {library.install}"
        ) from error
    check_version(backend, module.__version__)
    return module


def check_version(backend: str, version: str) -> None:
    """Raise ``BackendError`` unless ``version`` is in the tested range."""
    library = library_of(backend)
    found = tuple(int(part) for part in version.split(".")[:2])
    if not library.oldest <= found <= library.newest:
        oldest, newest = (".".join(map(str, limit)) for limit in (library.oldest, library.newest))
        raise BackendError(
            f"backend {backend}: {library.module} is {version}, expected {oldest} to {newest} (older ones cannot "
            f"update a KV cache in place, newer ones are not tested); {library.install}"
        )


def deserialize(trt: Any, runtime: Any, path: Path, fix: str, errors: Sequence[str] = ()) -> Any:
    """The engine in the file ``path``, from ``runtime`` (a ``trt.Runtime``); never None.

    ``errors`` are the lines that the runtime's logger keeps (``specrt.engines.trt.network.make_logger``), ``fix`` is
    the command that builds the engine again. Raises ``BackendError`` with what the library said.
    """
    already = len(errors)
    try:
        size = path.stat().st_size
        engine = _mapped(runtime, path) if size else None
    except OSError as error:
        raise BackendError(f"{path}: not readable ({error.strerror}); build it again with '{fix}'") from error
    if engine is None:
        said = list(errors)[already:]
        reason = said[0][:300] if said else "no reason given" if size else "an empty file"
        raise BackendError(
            f"{path}: {trt.__name__} {trt.__version__} makes no engine of its {size} bytes ({reason}), expected "
            f"one that this version built for this GPU; build it again with '{fix}'"
        )
    return engine


def _mapped(runtime: Any, path: Path) -> Any:
    """An engine is copied to the GPU: its file is mapped for that long, not read."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
        return runtime.deserialize_cuda_engine(plan)
