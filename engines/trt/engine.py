"""TensorRT and TensorRT-RTX engines behind the interface; one file for both modules, chosen by the backend's name.

Weights belong to an engine. A slot has a context for each (width, rows) that recurs, since a CUDA graph is captured
with one context, and another one for all wide passes of a prompt. KV inputs and outputs have the same address; where
a contract swaps their buffers, there is a context for each of the two places.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from specrt.engines.contract import ROWS, WIDTH, Contract
from specrt.engines.errors import BackendError, BundleError
from specrt.engines.gpu.binding import DeviceBinding
from specrt.engines.gpu.device import Device, open_device
from specrt.engines.gpu.graphs import RoundGraphs
from specrt.engines.interface import CUDA, KEPT_WIDTHS, Backend
from specrt.engines.manifest import manifest_from_bundle
from specrt.engines.trt.context import Pass, must
from specrt.engines.trt.library import DTYPES, check_capability, deserialize, load_library
from specrt.engines.trt.network import make_logger
from specrt.engines.trt.profiles import PREFILL
from specrt.engines.trt.record import EngineEntry, build_command, check_build, engines_folder, record_from_bundle
from specrt.engines.trt.runtime_cache import RuntimeCache


class TrtBackend(Backend):
    """The engines of one bundle, with their library, GPU and build record.

    Raises ``BackendError`` for a missing library, GPU or build, ``BundleError`` for a damaged build.
    """

    device = CUDA
    uses_graphs = True  # tests compare both modes

    def __init__(self, name: str, bundle: Path, threads: int | None = None) -> None:
        self.name, self.bundle = name, bundle
        manifest = manifest_from_bundle(bundle)
        self.trt = load_library(name, manifest.target.spec.dialect)
        self.record = record_from_bundle(bundle, name)
        self.gpu: Device = open_device()
        capability = self.gpu.api.compute_capability
        check_capability(name, self.trt, capability)
        for line in check_build(bundle, manifest, self.record, self.trt.__version__, capability):
            warnings.warn(line, stacklevel=2)
        self.logger = make_logger(self.trt)
        self._runtime = must(self.trt.Runtime(self.logger), f"{self.trt.__name__}: opening its runtime", self.logger)
        self.cache = RuntimeCache(self.trt, engines_folder(bundle, name))

    @property
    def folder(self) -> Path:
        return engines_folder(self.bundle, self.name)

    @property
    def fix(self) -> str:
        return f"build them again with '{build_command(self.bundle, self.name)}'"

    @property
    def cache_path(self) -> Path | None:
        """See ``specrt.engines.interface.Backend``. Only TensorRT-RTX compiles kernels when it runs."""
        return self.cache.path

    def save_cache(self) -> None:
        """See ``specrt.engines.interface.Backend``."""
        self.cache.save()

    def load(self, graph: str, contract: Contract, threads: int | None = None) -> TrtEngine:
        """See ``specrt.engines.interface.Backend.load``. Threads of the host are not used."""
        return TrtEngine(self, graph, contract)

    def entry_of(self, graph: str) -> EngineEntry:
        """The record of the engine that was built from ``graph``."""
        for entry in self.record.engines.values():
            if graph in entry.sources:
                return entry
        raise BundleError(f"{self.folder}: no engine for {graph}; {self.fix}")

    def deserialize(self, entry: EngineEntry) -> Any:
        """The library's engine. Raises ``BackendError`` if it cannot be deserialized."""
        command = build_command(self.bundle, self.name)
        return deserialize(self.trt, self._runtime, self.folder / entry.file, command, self.logger.errors)


class TrtEngine:
    """An engine and its weights. Raises ``BundleError`` if its tensors do not match ``contract``."""

    def __init__(self, backend: TrtBackend, graph: str, contract: Contract) -> None:
        self.backend, self.contract = backend, contract
        self.entry = backend.entry_of(graph)
        self.name = str(backend.folder / self.entry.file)
        self._check_widths()
        self._engine = backend.deserialize(self.entry)
        self._check_contract()

    def _check_widths(self) -> None:
        for dim in (WIDTH, ROWS):
            largest = max(profile.get(dim, (0,))[-1] for profile in self.entry.profiles.values())
            if self.contract.limits[dim] > largest:
                raise BackendError(
                    f"{self.name}: built for {largest} {dim}, and passes have up to {self.contract.limits[dim]}; "
                    f"{self.backend.fix}"
                )

    def _check_contract(self) -> None:
        trt, engine = self.backend.trt, self._engine
        found = {}
        for index in range(engine.num_io_tensors):
            name = engine.get_tensor_name(index)
            dtype, shape = engine.get_tensor_dtype(name).name, tuple(engine.get_tensor_shape(name))
            is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
            on_device = engine.get_tensor_location(name) == trt.TensorLocation.DEVICE
            alias = None if is_input else _alias_of(engine, name)
            found[name] = (is_input, DTYPES.get(dtype, dtype), shape, on_device, alias)
        expected = {}
        for is_input, tensors in ((True, self.contract.inputs), (False, self.contract.outputs)):
            for tensor in tensors:
                shape = tuple(-1 if isinstance(dim, str) else dim for dim in tensor.shape)
                expected[tensor.name] = (is_input, tensor.dtype, shape, True, tensor.alias)
        for name in sorted(found.keys() | expected.keys()):
            if found.get(name) != expected.get(name):
                raise BundleError(
                    f"{self.name}: differs from the contract at {name}: got {found.get(name)}, expected "
                    f"{expected.get(name)} (input, dtype, shape, on the GPU, alias); {self.backend.fix}"
                )
        if engine.num_optimization_profiles != len(self.entry.profiles):
            raise BundleError(
                f"{self.name}: {engine.num_optimization_profiles} profiles, its record has "
                f"{len(self.entry.profiles)}; {self.backend.fix}"
            )

    def open(self, shared: Mapping[str, Any] | None = None) -> TrtBinding:
        """See ``specrt.engines.interface.Engine.open``."""
        return TrtBinding(self, shared or {})

    def profile_for(self, width: int, rows: int) -> int:
        """The number of the narrowest profile for such a pass."""
        fitting = [
            (sizes[WIDTH][-1], index)
            for index, sizes in enumerate(self.entry.profiles.values())
            if width <= sizes[WIDTH][-1] and rows <= sizes[ROWS][-1]
        ]
        if not fitting:
            raise ValueError(f"pass of {width} tokens and {rows} rows: no profile of {self.name} is so large")
        return min(fitting)[1]

    def is_kept(self, width: int, rows: int) -> bool:
        """Whether passes of this size have their own context."""
        name = list(self.entry.profiles)[self.profile_for(width, rows)]
        return width <= KEPT_WIDTHS and name != PREFILL

    def new_pass(self, profile: int, addresses: Mapping[str, int], is_kept: bool) -> Pass:
        """A context on ``profile``. Passes that are not kept use kernels for any shape, without a graph."""
        backend, trt = self.backend, self.backend.trt
        backend.logger.errors.clear()
        user_managed = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        is_rtx = hasattr(trt, "CudaGraphStrategy")
        how = self._settings(user_managed, is_kept) if is_rtx else user_managed
        context = self._engine.create_execution_context(how)
        must(context, f"{self.name}: opening a context", backend.logger)
        made = Pass(context, backend.gpu, backend.logger, self.name, is_kept and backend.uses_graphs, is_kept)
        made.bind(profile, self._engine.device_memory_size_v2, addresses)
        return made

    def _settings(self, user_managed: Any, is_kept: bool) -> Any:
        """Kernels for the shapes of a kept pass are compiled at its first run, not in the background. Otherwise
        they would be replaced during a generation, and its logits would depend on timing. Graphs are ours: those that
        TensorRT-RTX captures by itself would collide with the capture of a round."""
        trt = self.backend.trt
        settings = self._engine.create_runtime_config()
        settings.set_execution_context_allocation_strategy(user_managed)
        graphs, kernels = trt.CudaGraphStrategy, trt.DynamicShapesKernelSpecializationStrategy
        settings.cuda_graph_strategy = graphs.DISABLED
        settings.dynamic_shapes_kernel_specialization_strategy = kernels.EAGER if is_kept else kernels.NONE
        self.backend.cache.attach(settings)
        return settings


def _alias_of(engine: Any, name: str) -> str | None:
    """The input whose memory an output shares. TensorRT before 10.15 has no such outputs."""
    find = getattr(engine, "get_aliased_input_tensor", None)
    return None if find is None else find(name) or None


class TrtBinding(DeviceBinding):
    """The memory and contexts of one slot; see ``specrt.engines.interface.Binding``."""

    def __init__(self, engine: TrtEngine, shared: Mapping[str, Any]) -> None:
        self._engine = engine
        self._kept: dict[tuple[int, int, int], Pass] = {}
        self._wide: dict[tuple[int, int], Pass] = {}
        super().__init__(engine.backend.gpu, engine.contract, shared)
        self._rounds = RoundGraphs(self.device)

    def together(self) -> AbstractContextManager[None]:
        """See ``specrt.engines.interface.Binding.together``."""
        is_fixed = not self.contract.swaps  # a larger graph would have to be captured for each place of the cache
        return self._rounds.together() if is_fixed and self._engine.backend.uses_graphs else nullcontext()

    def can_capture(self, width: int, rows: int) -> bool:
        """Whether such a pass has been captured alone, so that its first run is over and nothing in it forbids that."""
        made = self._kept.get((width, rows, self.turn))
        return made is not None and made.is_captured

    def enqueue_captured(self, width: int, rows: int) -> bool:
        """See ``DeviceBinding.enqueue_captured``."""
        return self._kept[width, rows, self.turn].run()

    def _launch(self, width: int, rows: int) -> None:
        (self._kept.get((width, rows, self.turn)) or self._prepared(width, rows)).enqueue()

    def _prepared(self, width: int, rows: int) -> Pass:
        engine, profile = self._engine, self._engine.profile_for(width, rows)
        is_kept = engine.is_kept(width, rows)
        found = None if is_kept else self._wide.get((profile, self.turn))
        if found is None:
            tensors = (*engine.contract.inputs, *engine.contract.outputs)
            found = engine.new_pass(profile, {tensor.name: self.address(tensor) for tensor in tensors}, is_kept)
        found.shape(self.shapes(width, rows))
        if is_kept:
            self._kept[width, rows, self.turn] = found
        else:
            self._wide[profile, self.turn] = found
        return found

    def _release(self) -> None:
        with self.device.lock:  # so that no thread enqueues or captures meanwhile
            self.device.wait()
            self._rounds.close()
            for made in (*self._kept.values(), *self._wide.values()):
                made.close()
        self._kept.clear()
        self._wide.clear()
        self._engine.backend.cache.save()  # saves newly compiled kernels
