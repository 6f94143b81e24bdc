"""From a backend's name and a device to its engines. A row of ``_LOADERS`` or ``_ON_CUDA`` for each backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from specrt.engines.contract import Contract
from specrt.engines.errors import BackendError, UsageError
from specrt.engines.interface import Engine
from specrt.engines.manifest import Manifest
from specrt.engines.processor import available_cores
from specrt.engines.trt.library import LIBRARIES

CPU, CUDA = "cpu", "cuda"
DEVICES = (CPU, CUDA)

_Load = Callable[[Path, Contract, int | None], Engine]


def _onnxruntime(graph: Path, contract: Contract, threads: int | None) -> Engine:
    from specrt.engines.ort.cpu import OrtEngine

    return OrtEngine(graph, contract, threads or available_cores())


def _onnxruntime_cuda(graph: Path, contract: Contract, threads: int | None) -> Engine:
    from specrt.engines.ort.cuda import OrtCudaEngine

    return OrtCudaEngine(graph, contract, threads or available_cores())


def _tensorrt(backend: str) -> _Load:
    def load(graph: Path, contract: Contract, threads: int | None) -> Engine:
        from specrt.engines.trt.engine import TrtEngine, bundle_of, open_build

        return TrtEngine(open_build(bundle_of(graph), backend), graph, contract)

    return load


_LOADERS: dict[str, _Load] = {"onnxruntime": _onnxruntime}
_ON_CUDA: dict[str, _Load] = {"onnxruntime": _onnxruntime_cuda, **{name: _tensorrt(name) for name in LIBRARIES}}


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


def choose_device(backend: str, wanted: str | None) -> str:
    """``wanted``, or where the backend runs: TensorRT on cuda, others on the cpu. Raises ``BackendError``."""
    if wanted is not None and wanted not in DEVICES:
        raise UsageError(f"device: got {wanted!r}, expected one of {', '.join(DEVICES)}")
    if wanted == CPU and backend in LIBRARIES:
        raise BackendError(
            f"device cpu: backend {backend} runs on a GPU only; leave the device out, or export with --backend "
            "onnxruntime"
        )
    return wanted or (CUDA if backend in LIBRARIES else CPU)


def load_engine(
    backend: str, graph: Path, contract: Contract, threads: int | None, device: str | None = None
) -> Engine:
    """Load one graph. Raises ``BackendError`` when the backend's library is missing, ``BundleError`` for the graph."""
    loaders = _LOADERS if choose_device(backend, device) == CPU else _ON_CUDA
    if backend not in loaders:
        known = ", ".join(sorted({*_LOADERS, *_ON_CUDA}))
        raise BackendError(f"backend {backend}: this specrt has {known}; install a newer one")
    return loaders[backend](graph, contract, threads)
