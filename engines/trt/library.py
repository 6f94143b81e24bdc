"""The modules ``tensorrt`` and ``tensorrt_rtx``, imported by the backend's name when needed."""

from __future__ import annotations

import importlib
import importlib.util
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from specrt.engines.contract import STANDARD_22_DIALECT, STANDARD_DIALECT
from specrt.engines.dialects import oldest_version
from specrt.engines.errors import BackendError, one_line


@dataclass(frozen=True)
class Library:
    """A module, and its oldest version for the dialect ``standard``.

    ``is_portable``: engines can be built without a GPU, for given compute capabilities. ``lists_layers``: its builder
    writes the layers of an engine to the log.
    """

    module: str
    install: str
    oldest: str
    is_portable: bool
    lists_layers: bool


LIBRARIES = {
    "tensorrt-rtx": Library("tensorrt_rtx", "pip install 'specrt[tensorrt-rtx]'", "1.7", True, True),
    "tensorrt": Library("tensorrt", "pip install 'tensorrt>=10.15'", "10.15", False, False),
}

# Names that a dialect needs and some versions lack. A version is accepted if it has all of them.
_MEMORY_OF_THE_CALLER = ("ICudaEngine.device_memory_size_v2", "ExecutionContextAllocationStrategy.USER_MANAGED")
NEEDED = {
    STANDARD_DIALECT: (
        "LayerType.KV_CACHE_UPDATE",
        "LayerType.ATTENTION_INPUT",
        "IAttentionInputLayer.attention",
        "ICudaEngine.get_aliased_input_tensor",
        *_MEMORY_OF_THE_CALLER,
    ),
    STANDARD_22_DIALECT: _MEMORY_OF_THE_CALLER,
}

OTHER_GPUS = "TensorRT-RTX is neither for Jetson nor for Hopper, use --backend tensorrt there"

# The library's names of dtypes, and specrt's
DTYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT64": "int64", "INT32": "int32"}


def library_of(backend: str) -> Library:
    """The row of ``backend``. Raises ``BackendError`` for a backend that has no engines to build."""
    if backend not in LIBRARIES:
        raise BackendError(f"backend {backend}: nothing to build; engines are for {', '.join(LIBRARIES)}")
    return LIBRARIES[backend]


def load_library(backend: str, dialect: str = STANDARD_DIALECT) -> Any:
    """The imported module of ``backend``.

    Raises ``BackendError`` when it is missing, cannot be loaded, or lacks a name that ``dialect`` needs.
    """
    library = library_of(backend)
    if importlib.util.find_spec(library.module) is None:
        raise BackendError(f"backend {backend}: {library.module} is not installed; {library.install}")
    try:
        module = importlib.import_module(library.module)
    except (ImportError, OSError) as error:  # the wheel is installed, but a shared library is missing
        reason = one_line(error)
        raise BackendError(
            f"backend {backend}: {library.module} cannot be loaded ({reason}); {library.install}"
        ) from error
    check_features(backend, module, dialect)
    return module


def check_features(backend: str, module: Any, dialect: str = STANDARD_DIALECT) -> None:
    """Raise ``BackendError`` unless ``module`` has all that ``dialect`` needs."""
    library = library_of(backend)
    missing = [name for name in NEEDED[dialect] if not _has(module, name)]
    if not missing:
        return
    oldest, older = library.oldest, ""
    if dialect != STANDARD_DIALECT:
        oldest = oldest_version(dialect)
    elif not any(not _has(module, name) for name in NEEDED[STANDARD_22_DIALECT]):
        number = ".".join(module.__version__.split(".")[:2])
        older = f", or export the bundle with --tensorrt-version {number}"
    raise BackendError(
        f"backend {backend}: {library.module} {module.__version__} has no {missing[0]}, which a bundle of the dialect "
        f"{dialect} needs; expected {oldest} or later; {library.install}{older}"
    )


def _has(module: Any, name: str) -> bool:
    try:
        attrgetter(name)(module)
    except AttributeError:
        return False
    return True


def known_capabilities(trt: Any) -> Mapping[str, Any]:
    """Compute capabilities such as ``8.9`` with the library's constants; empty if it builds only for the local GPU."""
    members = getattr(getattr(trt, "ComputeCapability", None), "__members__", {})
    return {f"{name[2:-1]}.{name[-1]}": value for name, value in members.items() if name.startswith("SM")}


def portable_capabilities(trt: Any) -> tuple[str, ...]:
    """The default compute capabilities of an engine: all of the library's except Turing (7.5)."""
    return tuple(capability for capability in known_capabilities(trt) if capability != "7.5")


def check_capability(backend: str, trt: Any, capability: str) -> None:
    """Raise ``BackendError`` for a GPU that the library does not support."""
    known = known_capabilities(trt)
    if known and capability not in known:
        raise BackendError(
            f"backend {backend}: {trt.__name__} {trt.__version__} has compute capability {', '.join(known)} and this "
            f"GPU has {capability}; {OTHER_GPUS}"
        )


def deserialize(trt: Any, runtime: Any, path: Path, fix: str, errors: Sequence[str] = ()) -> Any:
    """The engine in the file ``path``, from ``runtime`` (a ``trt.Runtime``); never None.

    ``errors`` are the lines that the runtime's logger keeps (``specrt.engines.trt.network.make_logger``), ``fix`` is
    the command that builds the engine again. Raises ``BackendError`` with the library's message.
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
    """The engine from a file that is mapped, not read, while it is copied to the GPU."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
        return runtime.deserialize_cuda_engine(plan)
