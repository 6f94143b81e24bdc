"""The modules ``tensorrt`` and ``tensorrt_rtx``: one interface, imported by backend's name when it is needed."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

from specrt.engines.errors import BackendError


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
        reason = " ".join(str(error).split())
        raise BackendError(
            f"backend {backend}: {library.module} cannot be loaded ({reason}); {library.install}"
        ) from error
    check_version(backend, module.__version__)
    return module


def check_version(backend: str, version: str) -> None:
    """Raise ``BackendError`` unless ``version`` lies in the tested range."""
    library = library_of(backend)
    found = tuple(int(part) for part in version.split(".")[:2])
    if not library.oldest <= found <= library.newest:
        oldest, newest = (".".join(map(str, limit)) for limit in (library.oldest, library.newest))
        raise BackendError(
            f"backend {backend}: {library.module} is {version}, expected {oldest} to {newest} (older ones cannot "
            f"update a KV cache in place, newer ones are not tested); {library.install}"
        )
