"""Every name that specrt uses of CUDA and TensorRT exists in the real modules, and so does the simulated GPU's."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specrt.engines.errors import BackendError
from specrt.engines.gpu import driver
from specrt.engines.trt.library import DTYPES
from tests.conftest import has_nvidia_gpu
from tests.engines.gpu.simulated_cuda import SimulatedCuda
from tests.engines.trt import simulated_trt

ROOT = Path(__file__).resolve().parents[3]


def calls_of_cuda() -> Iterator[tuple[str, int | None]]:
    """(name, number of arguments) of each CUDA function that engines/gpu/driver.py calls; None for enumerations."""
    tree = ast.parse((ROOT / "engines" / "gpu" / "driver.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            if name == "_call" and isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value), len(node.args) - 1
            elif name.startswith("cuda"):
                yield name, len(node.args)
        if isinstance(node, ast.Attribute) and node.attr.startswith("cuda"):
            yield node.attr, None


def test_cuda_bindings_have_what_is_called() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime")
    enumerations = (
        runtime.cudaMemcpyKind,
        runtime.cudaError_t,
        runtime.cudaStreamCaptureMode,
        runtime.cudaDeviceAttr,
    )
    called = dict.fromkeys(calls_of_cuda())
    assert len([name for name, count in called if count is not None]) > 15
    for name, count in called:
        owner: Any = next((e for e in enumerations if hasattr(e, name)), runtime)
        assert hasattr(owner, name), name
        if count is not None:
            parameters = inspect.signature(getattr(runtime, name)).parameters
            assert len(parameters) == count, f"{name}({', '.join(parameters)})"


def test_cuda_bindings_answer_with_a_status_first() -> None:
    """Without a driver each call returns an error; none raises."""
    runtime = pytest.importorskip("cuda.bindings.runtime")
    if has_nvidia_gpu():
        pytest.skip("a GPU is there: tests marked gpu use it")
    status, *_ = runtime.cudaMalloc(256)
    assert status != runtime.cudaError_t.cudaSuccess
    kind, text = runtime.cudaGetErrorString(status)
    assert (kind, type(text)) == (runtime.cudaError_t.cudaSuccess, bytes)
    with pytest.raises(BackendError, match=r"device cuda: cudaSetDevice failed \(CUDA driver version"):
        driver.RealCuda()


def test_the_simulated_gpu_has_the_interface_of_the_real_one() -> None:
    for name in (name for name in vars(driver.Cuda) if not name.startswith("_")):
        real, simulated = getattr(driver.RealCuda, name), getattr(SimulatedCuda, name)
        assert list(inspect.signature(real).parameters) == list(inspect.signature(simulated).parameters), name
    for name in driver.Cuda.__annotations__:
        assert hasattr(SimulatedCuda(), name), name


# What specrt and the simulation use of each class, by the name in both modules
CLASSES = (
    "Runtime",
    "ICudaEngine",
    "IExecutionContext",
    "IRuntimeConfig",
    "IRuntimeCache",
    "ILogger",
    "IProfiler",
    "TensorIOMode",
    "TensorLocation",
    "DataType",
    "ExecutionContextAllocationStrategy",
    "CudaGraphStrategy",
    "DynamicShapesKernelSpecializationStrategy",
)
OURS = {  # of the simulation itself
    "library", "logger", "graph", "contract", "profiles", "session", "contexts", "strategy", "cache", "entries",
    "engine", "config", "profile", "scratch", "addresses", "shapes", "is_captured", "runs",
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_tensorrt_has_what_the_simulation_has(name: str) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    real, simulated = getattr(trt, name), vars(simulated_trt)[name]
    members = {m for m in (*vars(simulated), *getattr(simulated, "__annotations__", {})) if not m.startswith("_")}
    if name == "IRuntimeConfig":
        members |= {"cuda_graph_strategy", "dynamic_shapes_kernel_specialization_strategy"}
    for member in members - OURS:
        assert hasattr(real, member), f"{name}.{member}"
        method = getattr(simulated, member, None)
        if inspect.isfunction(method):
            expected = [p for p in inspect.signature(method).parameters if p != "self"]
            assert len(expected) in arities(getattr(real, member)), f"{name}.{member}{expected}"


def arities(method: Any) -> set[int]:
    """How many arguments a method of the bindings takes, next to ``self``, by the signatures in its documentation."""
    signatures = re.findall(
        rf"{method.__name__}\(self: [^)]*?\)(?= ->)|{method.__name__}\(self: .*?\) ->", method.__doc__
    )
    counts = set()
    for signature in signatures:
        parameters = re.findall(r"(\w+): ", signature)
        counts |= {len(parameters) - 1, len([p for p in re.findall(r"(\w+): [^=,]*(?:,|\))", signature)]) - 1}
    return counts


def names_used(path: Path, roots: tuple[str, ...]) -> set[str]:
    """Attributes that a file takes of variables with these names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in roots:
            found.add(node.attr)
    return found


def test_every_name_that_the_runtime_uses_is_real() -> None:
    """By the variables that hold the library's objects in engines/trt/engine.py and its helpers."""
    trt = pytest.importorskip("tensorrt_rtx")
    engines = ROOT / "engines" / "trt"
    uses = {
        (engines / "engine.py", ("trt", "self.trt", "backend.trt")): trt,
        (engines / "engine.py", ("engine", "self._engine")): trt.ICudaEngine,
        (engines / "library.py", ("runtime",)): trt.Runtime,
        (engines / "engine.py", ("settings",)): trt.IRuntimeConfig,
        (engines / "engine.py", ("graphs",)): trt.CudaGraphStrategy,
        (engines / "engine.py", ("kernels",)): trt.DynamicShapesKernelSpecializationStrategy,
        (engines / "context.py", ("self._context",)): trt.IExecutionContext,
        (ROOT / "tools" / "gpu_check" / "experiments" / "kernels.py", ("trt",)): trt,
        (engines / "runtime_cache.py", ("settings",)): trt.IRuntimeConfig,
        (engines / "runtime_cache.py", ("self._cache",)): trt.IRuntimeCache,
    }
    ours = {"contract", "profile_for", "is_kept", "new_pass", "backend"}  # of our own TrtEngine
    for (path, roots), owner in uses.items():
        used = names_used(path, roots) - ours
        assert used, f"{path.name}: {roots} name nothing"
        assert [name for name in used if not hasattr(owner, name)] == [], f"{path.name}: {roots}"


def test_the_dtypes_are_those_of_the_library() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    assert set(DTYPES) <= set(trt.DataType.__members__)
