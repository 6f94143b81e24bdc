"""The time of each kernel of a pass, where the library reports it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from specrt.engines.interface import Binding, Engine, write_pass
from specrt.engines.trt.engine import TrtBinding, TrtEngine
from specrt.tools.gpu_check.experiments.timing import RUNS

Kernels = dict[str, float] | str  # ms by kernel, or why there are none


def kernel_ms(engine: Engine, binding: Binding, width: int, start: int) -> Kernels:
    """Mean ms of each layer of a pass of ``width`` tokens and rows after ``start`` cached ones, in their order.

    TensorRT and TensorRT-RTX report them to an ``IProfiler`` of a context. The library waits after each pass then, and
    uses no CUDA graph: the sum is not the time of a pass.
    """
    if not isinstance(engine, TrtEngine) or not isinstance(binding, TrtBinding):
        return "this library reports no kernels"
    trt, device = engine.backend.trt, binding.device
    if not hasattr(trt, "IProfiler"):
        return f"{trt.__name__} {trt.__version__} has no IProfiler"
    write_pass(binding.host, np.zeros(width, np.int64), start, width)
    binding.upload()
    profiler = _profiler(trt)
    tensors = (*engine.contract.inputs, *engine.contract.outputs)
    addresses = {tensor.name: binding.address(tensor) for tensor in tensors}
    made = engine.new_pass(engine.profile_for(width, width), addresses, is_kept=True)
    made.shape(binding.shapes(width, width))

    def run() -> bool:
        done = made.run()
        device.api.wait()
        return done

    with device.lock:
        is_done = run()
        made.report_to(profiler)
        is_done &= all([run() for _ in range(RUNS)])
    made.close()
    if not is_done or not profiler.ms:
        return f"{trt.__name__} {trt.__version__} reported no layer to an IProfiler"
    return {name: sum(times) / RUNS for name, times in profiler.ms.items()}


def _profiler(trt: Any) -> Any:
    class Profiler(trt.IProfiler):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.ms: dict[str, list[float]] = defaultdict(list)

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.ms[layer_name].append(ms)

    return Profiler()
