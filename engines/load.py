"""From a backend's name to its engines. A row of ``_LOADERS`` for each backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from specrt.engines.cpu import available_cores
from specrt.engines.errors import BackendError
from specrt.engines.manifest import Manifest
from specrt.engines.seam import Engine
from specrt.engines.spec import Contract
from specrt.engines.trt_library import LIBRARIES


def _onnxruntime(graph: Path, contract: Contract, threads: int | None) -> Engine:
    from specrt.engines.ort import OrtEngine

    return OrtEngine(graph, contract, threads or available_cores())


_LOADERS: dict[str, Callable[[Path, Contract, int | None], Engine]] = {"onnxruntime": _onnxruntime}


def choose_backend(manifest: Manifest, wanted: str | None) -> str:
    """``wanted``, or the bundle's first backend. Raises ``BackendError`` for one that the bundle does not list."""
    if wanted is None:
        return manifest.backends[0]
    if wanted not in manifest.backends:
        listed = ", ".join(manifest.backends)
        raise BackendError(
            f"backend {wanted}: this bundle was exported for {listed}; export again with --backend {wanted}"
        )
    return wanted


def load_engine(backend: str, graph: Path, contract: Contract, threads: int | None) -> Engine:
    """Load one graph. Raises ``BackendError`` when the backend's library is missing, ``BundleError`` for the graph."""
    if backend in LIBRARIES:
        raise BackendError(
            f"backend {backend}: this specrt builds its engines and has no runtime for them yet; "
            "to generate, export with --backend onnxruntime"
        )
    if backend not in _LOADERS:
        raise BackendError(f"backend {backend}: this specrt has {', '.join(_LOADERS)}; install a newer one")
    return _LOADERS[backend](graph, contract, threads)
