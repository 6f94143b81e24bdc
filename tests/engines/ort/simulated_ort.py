"""ONNX Runtime's CUDA provider for tests without a GPU: sessions on the CPU whose runs wait in the GPU's stream.

What the real provider reads on the host when a run is enqueued is copied then, and not read later.
"""

from __future__ import annotations

import functools
from ctypes import memmove
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from specrt.engines.gpu import device
from specrt.engines.gpu.device import Device
from specrt.engines.ort import cuda as ort_cuda
from specrt.engines.ort.cpu import session_options
from tests.engines.gpu.simulated_cuda import SimulatedCuda
from tests.exporter.samplers.random_ties import as_a_device_would

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


class SimulatedOrt:
    """Stands for the module ``onnxruntime`` with CUDA."""

    def __init__(self, cuda: SimulatedCuda, available: tuple[str, ...] = (CUDA, CPU), in_force: str = CUDA) -> None:
        self.cuda, self.available, self.in_force = cuda, available, in_force
        self.on_cpu: set[str] = set()  # names of graphs with a node that CUDA has no kernel for
        self.preloaded: list[str] = []
        self.unloadable = ""  # what ``preload_dlls`` prints of a library that is missing
        self.sessions: list[SimulatedSession] = []
        self.RunOptions, self.SessionOptions, self.__version__ = ort.RunOptions, ort.SessionOptions, ort.__version__

    def get_available_providers(self) -> list[str]:
        return list(self.available)

    def preload_dlls(self, directory: str) -> None:
        self.preloaded.append(directory)
        if self.unloadable:
            print(self.unloadable)

    def InferenceSession(self, graph: Any, options: Any, providers: list[Any]) -> Any:
        assert self.preloaded == [""], "CUDA's libraries are in packages that nobody loads by himself"
        if isinstance(graph, bytes):
            return SimpleNamespace(get_providers=lambda: [self.in_force, CPU])
        self.sessions.append(SimulatedSession(self, graph, options, providers))
        return self.sessions[-1]


def simulate_gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedOrt:
    """ONNX Runtime with a GPU, next to the real one on the CPU."""
    cuda = SimulatedCuda()
    opened = Device(cuda)
    module = SimulatedOrt(cuda)
    monkeypatch.setattr(ort_cuda, "ort", module)
    monkeypatch.setattr(ort_cuda, "check_provider", functools.cache(ort_cuda.check_provider.__wrapped__))
    for place in (device, ort_cuda):
        monkeypatch.setattr(place, "open_device", lambda ordinal=0: opened)
    return module


class SimulatedSession:
    """A session of the real library on its CPU provider."""

    def __init__(self, module: SimulatedOrt, graph: str, options: Any, providers: list[Any]) -> None:
        name, settings = providers[0]
        assert (name, settings["user_compute_stream"]) == (CUDA, str(module.cuda.stream))
        is_strict = CPU not in providers
        if is_strict:
            assert options.get_session_config_entry("session.disable_cpu_ep_fallback") == "1"
            if any(part in graph for part in module.on_cpu):
                raise RuntimeError("This session contains graph nodes that are assigned to the default CPU EP")
        self.is_strict, self._module = is_strict, module
        self._session = ort.InferenceSession(as_a_device_would(graph), session_options(1, True), providers=[CPU])

    def get_providers(self) -> list[str]:
        return [self._module.in_force, CPU]

    def get_inputs(self) -> Any:
        return self._session.get_inputs()

    def get_outputs(self) -> Any:
        return self._session.get_outputs()

    def io_binding(self) -> SimulatedBinding:
        return SimulatedBinding(self._module.cuda, self._session.io_binding())

    def run_with_iobinding(self, io: SimulatedBinding, options: Any) -> None:
        assert options.get_run_config_entry("disable_synchronize_execution_providers") == "1"
        now = {address: copy.copy() for address, copy in io.on_host.items()}

        def run() -> None:
            for address, values in now.items():
                memmove(io.places[address].ctypes.data, values.ctypes.data, values.nbytes)
            self._session.run_with_iobinding(io.real)

        self._module.cuda.enqueue(run)


class SimulatedBinding:
    """Tensors on the GPU must be there; one on the host is given to the real session from separate memory."""

    def __init__(self, cuda: SimulatedCuda, real: Any) -> None:
        self._cuda, self.real = cuda, real
        self.on_host: dict[int, Any] = {}
        self.places: dict[int, Any] = {}

    def bind_input(self, name: str, device: str, number: int, dtype: Any, shape: Any, address: int) -> None:
        if device == "cpu":
            from ctypes import c_uint8

            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            self.on_host[address] = np.ctypeslib.as_array((c_uint8 * size).from_address(address))
            self.places[address] = np.zeros(size, np.uint8)
            address = self.places[address].ctypes.data
        else:
            self._check(name, device, dtype, shape, address)
        self.real.bind_input(name, "cpu", 0, dtype, shape, address)

    def bind_output(self, name: str, device: str, number: int, dtype: Any, shape: Any, address: int) -> None:
        self._check(name, device, dtype, shape, address)
        self.real.bind_output(name, "cpu", 0, dtype, shape, address)

    def _check(self, name: str, device: str, dtype: Any, shape: Any, address: int) -> None:
        assert device == "cuda", f"{name} is bound on {device}"
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        assert self._cuda.is_within(self._cuda.sizes, address, num_bytes), f"{name} is not on the GPU"
