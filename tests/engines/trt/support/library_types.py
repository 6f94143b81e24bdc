"""Enumerations and settings of the simulated TensorRT, with the names of the real modules."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum


class TensorIOMode(Enum):
    NONE, INPUT, OUTPUT = range(3)


class TensorLocation(Enum):
    DEVICE, HOST = range(2)


class ExecutionContextAllocationStrategy(Enum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(3)


class CudaGraphStrategy(Enum):
    DISABLED, WHOLE_GRAPH_CAPTURE = range(2)


class DynamicShapesKernelSpecializationStrategy(Enum):
    LAZY, EAGER, NONE = range(3)


class DataType(Enum):
    FLOAT, HALF, BF16, INT64, INT32 = "float32", "float16", "bfloat16", "int64", "int32"


class ILogger:
    """The base of the logger that specrt makes."""

    INTERNAL_ERROR, ERROR, WARNING = range(3)


class IProfiler:
    """The base of a profiler; the library calls it once for each layer of a pass."""

    def report_layer_time(self, layer_name: str, ms: float) -> None:
        raise NotImplementedError


class ComputeCapability(Enum):
    NONE, CURRENT, SM75, SM80, SM86, SM89, SM120, SM121 = 0, 1, 75, 80, 86, 89, 120, 121


@dataclass
class IRuntimeCache:
    """Its content: what was compiled, see ``IExecutionContext._kernels``."""

    entries: set[str] = field(default_factory=set)

    def serialize(self) -> bytes:
        return json.dumps(sorted(self.entries)).encode()

    def deserialize(self, blob: bytes) -> bool:
        try:
            self.entries = set(json.loads(blob))
        except ValueError:
            return False
        return True


class IRuntimeConfig:
    """What a context is opened with."""

    def __init__(self) -> None:
        self.cuda_graph_strategy = CudaGraphStrategy.DISABLED
        self.dynamic_shapes_kernel_specialization_strategy = DynamicShapesKernelSpecializationStrategy.LAZY
        self.strategy = ExecutionContextAllocationStrategy.STATIC
        self.cache: IRuntimeCache | None = None

    def set_execution_context_allocation_strategy(self, strategy: ExecutionContextAllocationStrategy) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> IRuntimeCache:
        return IRuntimeCache()

    def set_runtime_cache(self, cache: IRuntimeCache) -> bool:
        self.cache = cache
        return True
