"""ONNX Runtime's CUDA provider behind the interface, on specrt's memory, in the one stream used for all work.

No CUDA graphs: ``GroupQueryAttention`` reads ``total_sequence_length`` on the host and selects its kernels by it, so a
graph would repeat the length it was captured with. Also, ONNX Runtime 1.32 waits when it replays a graph.
"""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specrt.engines.contract import ROWS, TOTAL_SEQUENCE_LENGTH, WIDTH, Contract
from specrt.engines.errors import BackendError, BundleError, PlacementWarning
from specrt.engines.gpu.binding import DeviceBinding
from specrt.engines.gpu.device import open_device
from specrt.engines.interface import CUDA, Array, Engine
from specrt.engines.ort.cpu import OrtBackend, OrtBinding, check_graph, session_options
from specrt.engines.ort.library import ort

_CUDA, _CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
INSTALL = "pip uninstall onnxruntime; pip install 'specrt[gpu]'"
# A graph of one Identity from x [1] to y [1], both float32, in opset 13: opened to check that the provider loads.
_PROBE = bytes.fromhex(
    "08083a370a100a017812017922084964656e746974791201675a0f0a0178120a0a08080112040a020801620f0a0179120a0a08080112040a02080142040a00100d"
)
_HALF = ("float16", "bfloat16")


class OrtCudaBackend(OrtBackend):
    """The graphs of a bundle on the GPU."""

    device = CUDA

    def load(self, graph: str, contract: Contract, threads: int | None = None) -> Engine:
        """See ``specrt.engines.interface.Backend.load``."""
        return OrtCudaEngine(self._bundle / graph, contract, threads or self._threads)


class OrtCudaEngine:
    """A graph and its weights on the GPU.

    Raises ``BackendError`` if the provider is missing or inactive or has no kernels for the bundle's dtype, and
    ``BundleError`` if the graph cannot be loaded or does not match ``contract``.
    """

    place = "CUDA"

    def __init__(self, graph: Path, contract: Contract, threads: int) -> None:
        self.contract, self.device = contract, open_device()
        _check_dtype(graph, contract)
        self._check_provider()
        self.session, not_strict = self._open(graph, threads)
        if not_strict is not None:
            line = f"{graph}: some of it runs on the CPU, with copies in every pass ({not_strict}); expect slow rounds"
            warnings.warn(line, PlacementWarning, stacklevel=2)
        check_graph(self.session, contract, graph)
        self.options = ort.RunOptions()
        self.options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def _check_provider(self) -> None:
        check_provider()

    def _open(self, graph: Path, threads: int) -> tuple[Any, str | None]:
        """A session without nodes on the CPU; if that is impossible, one with such nodes, and the reason."""
        try:
            return self._session(graph, threads, strict=True), None
        except Exception as error:  # onnxruntime's exceptions have no common base class
            reason = str(error).splitlines()[0]
        try:
            return self._session(graph, threads, strict=False), reason
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise BundleError(
                f"{graph}: onnxruntime {ort.__version__} cannot load it on {self.place} ({reason}); export it again"
            ) from error

    def _session(self, graph: Path, threads: int, strict: bool) -> Any:
        options = session_options(threads, prepack=True)
        if strict:
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        settings = {"user_compute_stream": str(self.device.api.stream), "use_ep_level_unified_stream": "1"}
        providers: list[Any] = [(_CUDA, settings)]
        return ort.InferenceSession(str(graph), options, providers=providers if strict else [*providers, _CPU])

    def open(self, shared: Mapping[str, Any] | None = None) -> OrtCudaBinding:
        """See ``specrt.engines.interface.Engine.open``."""
        return OrtCudaBinding(self, shared or {})


@functools.cache
def check_provider() -> None:
    """Load the provider with CUDA and cuDNN from their packages. Raises ``BackendError`` if that fails."""
    available = ort.get_available_providers()
    if _CUDA not in available:
        raise BackendError(f"device cuda: this onnxruntime has no {_CUDA}, only {', '.join(available)}; {INSTALL}")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):  # the provider prints what it cannot load
        ort.preload_dlls(directory="")
    providers = ort.InferenceSession(_PROBE, session_options(1, prepack=True), providers=[_CUDA, _CPU]).get_providers()
    if providers[:1] != [_CUDA]:
        reason = f" ({line})" if (line := said.getvalue().partition("\n")[0]) else ""
        raise BackendError(
            f"device cuda: expected {_CUDA}, got {', '.join(providers)}; a library of CUDA or cuDNN is missing or "
            f"of another version{reason}; {INSTALL}"
        )


def _check_dtype(graph: Path, contract: Contract) -> None:
    """Attention has kernels for half precision only."""
    caches = {tensor.dtype for tensor in contract.inputs if tensor.name.startswith("past_")}
    if wrong := sorted(caches - set(_HALF)):
        raise BackendError(
            f"{graph}: its KV cache is {wrong[0]}, on CUDA it must be {' or '.join(_HALF)}; export again with "
            "--dtype fp16"
        )


class OrtCudaBinding(DeviceBinding):
    """The memory and bindings of one slot; see ``specrt.engines.interface.Binding``."""

    def __init__(self, engine: OrtCudaEngine, shared: Mapping[str, Any]) -> None:
        self._engine = engine
        self._bound: dict[tuple[int, int], Any] = {}
        super().__init__(engine.device, engine.contract, shared)
        self._total: Array = self.host.get(TOTAL_SEQUENCE_LENGTH, np.zeros(1, np.int32))

    def _bind(self, width: int, rows: int) -> Any:
        limits = self.contract.limits
        dims = {**limits, WIDTH: width, ROWS: rows}
        io = self._engine.session.io_binding()
        for tensor in self.contract.inputs:
            shape = tensor.resolve(dims)
            if tensor.name == TOTAL_SEQUENCE_LENGTH:  # read on the host, when the pass is enqueued
                io.bind_input(tensor.name, "cpu", 0, self._total.dtype, shape, self._total.ctypes.data)
            else:
                io.bind_input(tensor.name, "cuda", 0, _element(tensor.dtype), shape, self.address(tensor))
        for tensor in self.contract.outputs:
            shape = tensor.resolve(dims)
            io.bind_output(tensor.name, "cuda", 0, _element(tensor.dtype), shape, self.address(tensor))
        if width <= OrtBinding.KEPT_WIDTHS or width == limits[WIDTH]:
            self._bound[width, rows] = io
        return io

    def _launch(self, width: int, rows: int) -> None:
        io = self._bound.get((width, rows)) or self._bind(width, rows)
        self._engine.session.run_with_iobinding(io, self._engine.options)

    def _release(self) -> None:
        self.device.wait()
        self._bound.clear()


_BFLOAT16 = 16  # ONNX's number of this type, which numpy does not have


def _element(dtype: str) -> Any:
    return _BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
