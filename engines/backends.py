"""The table of backends: their names, devices and classes. To add a backend, add a row here.

The class is a ``specrt.engines.interface.Backend``. It and its library are imported when the backend is opened.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from specrt.engines.errors import BackendError, UsageError
from specrt.engines.interface import CPU, CUDA, DEVICES, Backend
from specrt.engines.manifest import Manifest

# (name, bundle, threads; None: all cores) -> a backend
OpenBackend = Callable[[str, Path, int | None], Backend]


def _row(module: str, class_name: str) -> OpenBackend:
    def open_it(name: str, bundle: Path, threads: int | None) -> Backend:
        made: Backend = getattr(import_module(module), class_name)(name, bundle, threads)
        return made

    return open_it


_TENSORRT = {CUDA: _row("specrt.engines.trt.engine", "TrtBackend")}
# By name and device; the first device is the default.
BACKENDS: dict[str, dict[str, OpenBackend]] = {
    "onnxruntime": {
        CPU: _row("specrt.engines.ort.cpu", "OrtBackend"),
        CUDA: _row("specrt.engines.ort.cuda", "OrtCudaBackend"),
    },
    "onnxruntime-rtx": {CUDA: _row("specrt.engines.ort.rtx", "OrtRtxBackend")},
    "tensorrt-rtx": _TENSORRT,
    "tensorrt": _TENSORRT,
}
# Backends that no bundle lists: they are chosen by name, and run the bundles of the backend given here.
RUNS_BUNDLES_OF = {"onnxruntime-rtx": "onnxruntime"}


def open_backend(
    bundle: Path, manifest: Manifest, name: str | None = None, device: str | None = None, threads: int | None = None
) -> Backend:
    """Open a backend for ``bundle``, by default the bundle's first one, with ``threads`` (None: all cores).

    Raises ``BackendError`` for a backend or device that the bundle was not exported for, and if a library, a GPU or
    engines are missing.
    """
    name = choose_backend(manifest, name)
    device = choose_device(name, device)
    return BACKENDS[name][device](name, bundle, threads)


def choose_backend(manifest: Manifest, wanted: str | None) -> str:
    """``wanted``, or the bundle's first backend. Raises ``BackendError`` for one that does not run the bundle."""
    if wanted is None:
        return manifest.backends[0]
    exported = RUNS_BUNDLES_OF.get(wanted, wanted)
    if exported not in manifest.backends:
        listed = ", ".join(manifest.backends)
        raise BackendError(
            f"backend {wanted}: this bundle was exported for {listed}; export again with --backend {exported}"
        )
    return wanted


def choose_device(backend: str, wanted: str | None) -> str:
    """``wanted``, or the backend's default: cpu for onnxruntime, cuda for others. Raises ``BackendError``."""
    if wanted is not None and wanted not in DEVICES:
        raise UsageError(f"device: got {wanted!r}, expected one of {', '.join(DEVICES)}")
    if backend not in BACKENDS:
        raise BackendError(f"backend {backend}: this specrt has {', '.join(sorted(BACKENDS))}; install a newer one")
    devices = BACKENDS[backend]
    if wanted is not None and wanted not in devices:
        raise BackendError(
            f"device {wanted}: backend {backend} runs on {'a GPU' if CUDA in devices else 'the CPU'} only; leave the "
            "device out, or export with --backend onnxruntime"
        )
    return wanted or next(iter(devices))
