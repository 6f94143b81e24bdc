"""TensorRT's runtime for tests without a GPU: its contexts run the bundle's ONNX graph on ONNX Runtime's CPU provider.

An engine file has the path of the graph that it represents. Names are those of the real modules (a test compares
them), and what TensorRT refuses is refused: no shape, a shape outside the profile, an address that is missing,
unaligned, not on the GPU, or changed after a capture; no working memory; a KV output that is not where its input is.
A context allocates in its first run, and working memory holds nothing from one run to the next.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from specrt.engines.contract import ITEM_BYTES, LOGITS, ROW_INDICES, ROWS, Contract
from specrt.engines.ort.cpu import session_options
from specrt.engines.trt.profiles import shapes_of
from tests.engines.gpu.simulated_cuda import ALIGNMENT, POISON, SimulatedCuda
from tests.engines.trt.support.library_types import ComputeCapability as ComputeCapability
from tests.engines.trt.support.library_types import CudaGraphStrategy as CudaGraphStrategy
from tests.engines.trt.support.library_types import DataType as DataType
from tests.engines.trt.support.library_types import (
    DynamicShapesKernelSpecializationStrategy as DynamicShapesKernelSpecializationStrategy,
)
from tests.engines.trt.support.library_types import (
    ExecutionContextAllocationStrategy as ExecutionContextAllocationStrategy,
)
from tests.engines.trt.support.library_types import ILogger as ILogger
from tests.engines.trt.support.library_types import IRuntimeCache as IRuntimeCache
from tests.engines.trt.support.library_types import IRuntimeConfig as IRuntimeConfig
from tests.engines.trt.support.library_types import TensorIOMode as TensorIOMode
from tests.engines.trt.support.library_types import TensorLocation as TensorLocation
from tests.exporter.samplers.random_ties import as_a_device_would

SCRATCH_BYTES = 4096


class Library:
    """The module: RTX's, or TensorRT's, which has neither graphs nor a cache. ``engines`` are all loaded."""

    def __init__(self, cuda: SimulatedCuda, contracts: dict[str, Contract], is_rtx: bool) -> None:
        self.__name__, self.__version__ = ("tensorrt_rtx", "1.7.1") if is_rtx else ("tensorrt", "10.15.1")
        self.cuda, self.contracts = cuda, contracts
        self.engines: list[ICudaEngine] = []
        self.is_capturable = True  # what RTX's contexts answer
        self.compiled: list[str] = []  # kernels that no cache had, in the first run that needs them
        self.rounding = 0.0  # of the logits, by the number of rows: a share of the largest
        shared = (TensorIOMode, TensorLocation, ExecutionContextAllocationStrategy, ILogger)
        rtx = (CudaGraphStrategy, DynamicShapesKernelSpecializationStrategy, IRuntimeCache, ComputeCapability)
        own = rtx if is_rtx else ()
        for kind in (*shared, *own):
            setattr(self, kind.__name__, kind)

    def Runtime(self, logger: Any) -> Runtime:
        return Runtime(self, logger)


@dataclass
class Runtime:
    library: Library
    logger: Any

    def deserialize_cuda_engine(self, plan: Any) -> ICudaEngine | None:
        try:
            content = json.loads(bytes(plan))
        except ValueError:
            self.logger.log(ILogger.ERROR, "the engine is corrupt")
            return None
        engine = ICudaEngine(self.library, self.logger, content["graph"], content["profiles"])
        self.library.engines.append(engine)
        return engine


class ICudaEngine:
    """A graph in a session, shared by its contexts."""

    device_memory_size_v2 = SCRATCH_BYTES

    def __init__(self, library: Library, logger: Any, graph: str, profiles: dict[str, dict[str, list[int]]]) -> None:
        self.library, self.logger, self.graph = library, logger, graph
        self.contract = library.contracts[graph]
        self.profiles = [
            shapes_of(self.contract, {k: tuple(v) for k, v in sizes.items()}) for sizes in profiles.values()
        ]
        self.session = ort.InferenceSession(
            as_a_device_would(graph), session_options(1, True), providers=["CPUExecutionProvider"]
        )
        self._tensors = {t.name: t for t in (*self.contract.inputs, *self.contract.outputs)}
        self.contexts: list[IExecutionContext] = []

    @property
    def num_io_tensors(self) -> int:
        return len(self._tensors)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.profiles)

    def get_tensor_name(self, index: int) -> str:
        return list(self._tensors)[index]

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType(self._tensors[name].dtype)

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(-1 if isinstance(dim, str) else dim for dim in self._tensors[name].shape)

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        is_input = any(tensor.name == name for tensor in self.contract.inputs)
        return TensorIOMode.INPUT if is_input else TensorIOMode.OUTPUT

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.DEVICE

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self._tensors[name].alias

    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig()

    def create_execution_context(self, how: Any) -> IExecutionContext:
        config = how if isinstance(how, IRuntimeConfig) else IRuntimeConfig()
        strategy = how.strategy if isinstance(how, IRuntimeConfig) else how
        kind = RtxContext if isinstance(how, IRuntimeConfig) else IExecutionContext
        self.contexts.append(kind(self, strategy, config))
        return self.contexts[-1]


class IExecutionContext:
    """Enqueues runs; each takes shapes and addresses as they are when it is enqueued."""

    def __init__(
        self, engine: ICudaEngine, strategy: ExecutionContextAllocationStrategy, config: IRuntimeConfig
    ) -> None:
        self.engine, self.strategy, self.config = engine, strategy, config
        self.profile = -1
        self.scratch: tuple[int, int] | None = None
        self.addresses: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {
            t.name: t.resolve({}) for t in engine.contract.inputs if all(isinstance(d, int) for d in t.shape)
        }
        self.is_captured = False
        self.runs = 0

    def _refuse(self, reason: str) -> bool:
        self.engine.logger.log(ILogger.ERROR, reason)
        return False

    def set_device_memory(self, address: int, size: int) -> None:
        assert address % ALIGNMENT == 0 and self.engine.library.cuda.is_within(
            self.engine.library.cuda.sizes, address, size
        )
        self.scratch = (address, size)

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        if stream != self.engine.library.cuda.stream or not 0 <= index < len(self.engine.profiles):
            return self._refuse(f"no profile {index}")
        self.profile = index
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        if self.is_captured:
            raise AssertionError(f"{name} is moved after the context was captured")
        if name not in self.engine._tensors or address % ALIGNMENT:
            return self._refuse(f"{name}: not a tensor, or {address} is not aligned")
        self.addresses[name] = address
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.engine.library.cuda.counts["set_input_shape"] += 1
        if self.is_captured:
            raise AssertionError(f"{name} is given a shape after the context was captured")
        limits = self.engine.profiles[self.profile].get(name)
        if limits is None:
            fits = tuple(shape) == self.engine.get_tensor_shape(name)
        else:
            fits = len(shape) == len(limits[0]) and all(
                a <= b <= c for a, b, c in zip(limits[0], shape, limits[2], strict=True)
            )
        if not fits:
            return self._refuse(f"{name}: {list(shape)} is outside of profile {self.profile}")
        self.shapes[name] = tuple(shape)
        return True

    def infer_shapes(self) -> list[str]:
        self.engine.library.cuda.counts["infer_shapes"] += 1
        return self._without_shape()

    def _without_shape(self) -> list[str]:
        return [tensor.name for tensor in self.engine.contract.inputs if tensor.name not in self.shapes]

    @property
    def _kernels(self) -> str:
        """The engine, and the shapes of its inputs where kernels are made for them."""
        how = self.config.dynamic_shapes_kernel_specialization_strategy
        is_special = how is not DynamicShapesKernelSpecializationStrategy.NONE
        shapes = [*dict.fromkeys(self.shapes.values())] if is_special else "any"
        return f"{'/'.join(Path(self.engine.graph).parts[-3:])} {shapes}"

    def execute_async_v3(self, stream: int) -> bool:
        engine, cuda = self.engine, self.engine.library.cuda
        cuda.counts["execute"] += 1
        if self.profile < 0 or self._without_shape() or stream != cuda.stream:
            return self._refuse("profile, shapes or stream are missing")
        if self.strategy is ExecutionContextAllocationStrategy.USER_MANAGED and (
            self.scratch is None or self.scratch[1] < engine.device_memory_size_v2
        ):
            return self._refuse("no working memory")
        io = self._bound()
        if io is None:
            return False
        if not self.runs:
            cuda.free_of_library(cuda.allocate_of_library(256))  # cuBLAS, kernels' code: no first run can be captured
        self.runs += 1
        if self.config.cache is not None and self._kernels not in self.config.cache.entries:
            self.config.cache.entries.add(self._kernels)
            engine.library.compiled.append(self._kernels)
        self.is_captured |= cuda._capturing is not None
        cuda.enqueue(lambda: self._compute(io))
        return True

    def _compute(self, io: Any) -> None:
        """One run: working memory holds what another run left there, and is left as that."""
        self._spoil_scratch()
        self.engine.session.run_with_iobinding(io)
        self._round()
        self._spoil_scratch()

    def _spoil_scratch(self) -> None:
        if self.scratch is not None:
            address, size = self.scratch
            self.engine.library.cuda.view(address, size)[:] = POISON

    def _round(self) -> None:
        """Logits as kernels for another number of rows would give them: the same except for the last bits."""
        tensor = next((t for t in self.engine.contract.outputs if t.name == LOGITS), None)
        rows = self.shapes.get(ROW_INDICES, (0,))[0]
        if tensor is None or not self.engine.library.rounding or rows < 2:
            return
        count = int(np.prod(tensor.resolve({ROWS: rows})))
        logits = self.engine.library.cuda.view(self.addresses[LOGITS], 4 * count).view(np.float32)
        noise = np.random.default_rng(rows).standard_normal(count).astype(np.float32)
        logits += self.engine.library.rounding * np.abs(logits).max() * noise

    def _bound(self) -> Any:
        """The session's binding at the addresses that were set; None where one will not do."""
        dims = {}
        for tensor in self.engine.contract.inputs:
            dims.update(
                {d: size for d, size in zip(tensor.shape, self.shapes[tensor.name], strict=True) if isinstance(d, str)}
            )
        io, cuda = self.engine.session.io_binding(), self.engine.library.cuda
        for tensors, bind in (
            (self.engine.contract.inputs, io.bind_input),
            (self.engine.contract.outputs, io.bind_output),
        ):
            for tensor in tensors:
                address, shape = self.addresses.get(tensor.name), tensor.resolve(dims)
                num_bytes = int(np.prod(shape)) * ITEM_BYTES[tensor.dtype]
                if address is None or not cuda.is_within(cuda.sizes, address, num_bytes):
                    self._refuse(f"{tensor.name}: no address on the GPU with {num_bytes} bytes")
                    return None
                if tensor.alias and address != self.addresses[tensor.alias]:
                    self._refuse(f"{tensor.name} is not where {tensor.alias} does")
                    return None
                bind(tensor.name, "cpu", 0, np.dtype(tensor.dtype), shape, address)
        return io


class RtxContext(IExecutionContext):
    """TensorRT-RTX's, which knows whether it can be captured."""

    def is_stream_capturable(self, stream: int) -> bool:
        return self.engine.library.is_capturable
