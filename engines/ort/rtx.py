"""TensorRT-RTX as a plugin provider of ONNX Runtime, on bundles of backend ``onnxruntime``. No GPU has run it.

The provider is a library that is registered by its path: that of ``SPECRT_RTX_PROVIDER``, else of the package
``onnxruntime-ep-nv-tensorrt-rtx``. It imports ``GroupQueryAttention`` and ``MatMulNBits`` itself. The backend is chosen
by name only, and every load tests passes of each width first (``specrt.runtime.widths``).
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specrt.engines.contract import ROWS, WIDTH, Contract
from specrt.engines.errors import BackendError, one_line
from specrt.engines.interface import CUDA, Engine
from specrt.engines.ort.cpu import OrtBackend, session_options
from specrt.engines.ort.cuda import OrtCudaEngine
from specrt.engines.ort.library import ort

BACKEND = "onnxruntime-rtx"
LIBRARY_VARIABLE = "SPECRT_RTX_PROVIDER"
PROVIDER = "NvTensorRTRTXExecutionProvider"
INSTALL = "pip uninstall onnxruntime-gpu; pip install 'specrt[onnxruntime-rtx]'"
_PACKAGE = "onnxruntime_ep_nv_tensorrt_rtx"


class OrtRtxBackend(OrtBackend):
    """The graphs of a bundle on the GPU. Raises ``BackendError`` if the provider or a GPU that it takes is missing."""

    device = CUDA

    def __init__(self, name: str, bundle: Path, threads: int | None) -> None:
        super().__init__(name, bundle, threads)
        find_devices()

    def load(self, graph: str, contract: Contract, threads: int | None = None) -> Engine:
        """See ``specrt.engines.interface.Backend.load``."""
        return OrtRtxEngine(self._bundle / graph, contract, threads or self._threads)


class OrtRtxEngine(OrtCudaEngine):
    """A graph and its weights on the GPU, with an optimization profile for the contract's sizes."""

    place = "TensorRT-RTX"

    def _check_provider(self) -> None:
        find_devices()

    def _session(self, graph: Path, threads: int, strict: bool) -> Any:
        options = session_options(threads, prepack=True)
        if strict:
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        options.add_provider_for_devices(find_devices()[:1], provider_options(self.contract, self.device.api.stream))
        return ort.InferenceSession(str(graph), options)


def provider_options(contract: Contract, stream: int) -> dict[str, str]:
    """Our stream, memory that is kept between passes, and the smallest, usual and largest shapes of the inputs."""
    limits = contract.limits
    usual = {**limits, WIDTH: min(limits[WIDTH], limits[ROWS])}
    smallest = {**limits, WIDTH: 1, ROWS: 1}
    shapes = {"min": smallest, "opt": usual, "max": limits}
    options = {
        "has_user_compute_stream": "1",
        "user_compute_stream": str(stream),
        "nv_persistent_context_memory": "1",
    }
    for name, dims in shapes.items():
        inputs = (f"{tensor.name}:{'x'.join(map(str, tensor.resolve(dims)))}" for tensor in contract.inputs)
        options[f"nv_profile_{name}_shapes"] = ",".join(inputs)
    return options


@functools.cache
def find_devices() -> list[Any]:
    """The devices of the provider, which is registered once in a process. Raises ``BackendError``."""
    register: Callable[[str, str], None] | None = getattr(ort, "register_execution_provider_library", None)
    if register is None:
        raise BackendError(
            f"backend {BACKEND}: onnxruntime {ort.__version__} takes no plugin providers, expected 1.24 or later; "
            f"{INSTALL}"
        )
    path = library_path()
    try:
        register(f"specrt.{PROVIDER}", str(path))
    except Exception as error:  # onnxruntime's exceptions have no common base class
        raise BackendError(
            f"backend {BACKEND}: onnxruntime {ort.__version__} cannot load {path} ({_cause(error)}); it needs NVIDIA's "
            f"driver and its own libraries: {INSTALL}, or name another in {LIBRARY_VARIABLE}"
        ) from error
    devices = [device for device in ort.get_ep_devices() if device.ep_name == PROVIDER]
    if not devices:
        raise BackendError(
            f"backend {BACKEND}: {path} found no GPU that it runs on, expected compute capability 8.6, 8.9, or 12.0 or "
            "later; use --backend onnxruntime --device cuda"
        )
    return devices


def library_path() -> Path:
    """The provider's library: the one that the environment names, else the package's. Raises ``BackendError``."""
    if named := os.environ.get(LIBRARY_VARIABLE):
        if not Path(named).is_file():
            raise BackendError(f"backend {BACKEND}: {LIBRARY_VARIABLE} names {named}, which is no file; correct it")
        return Path(named).resolve()
    try:
        package = importlib.import_module(_PACKAGE)  # this loads the libraries that the provider needs
        return Path(package.get_library_path())
    except (ImportError, OSError) as error:
        raise BackendError(
            f"backend {BACKEND}: its provider is not installed ({one_line(error)}); {INSTALL}, or name the library in "
            f"{LIBRARY_VARIABLE}"
        ) from error


def _cause(error: Exception) -> str:
    """The part of ONNX Runtime's text after the path."""
    return one_line(error).rpartition("with error: ")[2]
