"""One execution context of a TensorRT engine: addresses bound once, shapes set, run as a CUDA graph if that works."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from specrt.engines.errors import BackendError
from specrt.engines.gpu.device import Device


def must(done: Any, what: str, logger: Any) -> Any:
    """Return ``done``. Raises ``BackendError`` with the library's reason if it is False or None."""
    if done is None or done is False:
        reason = logger.errors[-1] if logger.errors else "no reason given"
        raise BackendError(f"{what} failed ({reason[:300]}); build the engines again with 'specrt build --force'")
    return done


class Pass:
    """A context on one profile, bound to a slot's tensors. All contexts share their working memory.

    ``captures``: from its second run on it runs as a CUDA graph, whose shapes are fixed. ``is_kept``: it runs in every
    round and should not allocate there.
    """

    def __init__(self, context: Any, device: Device, logger: Any, name: str, captures: bool, is_kept: bool) -> None:
        self._context, self._device, self._logger, self._name = context, device, logger, name
        self._captures, self._is_kept = captures, is_kept
        self._graph: Any = None
        self._num_runs = 0
        self._shapes: dict[str, tuple[int, ...]] = {}

    def bind(self, profile: int, scratch_bytes: int, addresses: Mapping[str, int]) -> None:
        """Set the profile and all addresses, once for all runs."""
        if scratch_bytes:
            self._context.set_device_memory(*self._device.scratch(scratch_bytes))
        stream = self._device.api.stream
        self._must(self._context.set_optimization_profile_async(profile, stream), f"choosing profile {profile}")
        for name, address in addresses.items():
            self._must(self._context.set_tensor_address(name, address), f"binding {name}")

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Set the inputs' shapes that have changed."""
        for name, shape in shapes.items():
            if self._shapes.get(name) != shape:
                self._must(self._context.set_input_shape(name, shape), f"setting {name} to {list(shape)}")
                self._shapes[name] = shape
        try:
            missing = self._context.infer_shapes()
        except RuntimeError as error:  # for errors other than missing shapes
            reason = " ".join(str(error).split())[:300]
            raise BackendError(f"{self._name}: inferring shapes failed ({reason}); report this model") from error
        if missing:
            raise BackendError(f"{self._name}: {', '.join(missing)} has no shape; report this model")

    @property
    def is_captured(self) -> bool:
        """Whether it runs as a CUDA graph."""
        return self._graph is not None

    def enqueue(self) -> None:
        """Enqueue one run. The first is without a graph, since the library initializes in it."""
        if self._graph is not None:
            self._device.api.launch(self._graph)
            return
        if self._is_kept and self._num_runs == 1:
            self._check_allocations()
        if self._captures and self._num_runs == 1:
            self._graph = self._device.api.capture(self.run)
            if self._graph is not None:
                self._device.api.launch(self._graph)
                return
            self._captures = False
            self._warn("it cannot be captured as a CUDA graph, and runs without one")
        self._num_runs += 1
        self._must(self.run(), "running it")

    def _check_allocations(self) -> None:
        """Warn if a pass allocates memory. Only TensorRT-RTX reports that."""
        context = self._context
        if hasattr(context, "is_stream_capturable") and not context.is_stream_capturable(self._device.api.stream):
            self._captures = False
            self._warn("it allocates memory in its passes, and rounds may wait for that; build the engines again")

    def _warn(self, line: str) -> None:
        warnings.warn(f"{self._name}: {line}", stacklevel=2)

    def run(self) -> bool:
        """Enqueue one run without a graph. Returns whether the library took it."""
        return bool(self._context.execute_async_v3(self._device.api.stream))

    def report_to(self, profiler: Any) -> None:
        """Let later runs report the time of each layer to ``profiler``, an ``IProfiler`` of the library."""
        self._context.profiler = profiler

    def _must(self, done: Any, what: str) -> None:
        must(done, f"{self._name}: {what}", self._logger)

    def close(self) -> None:
        """Free the graph and the context. Their runs must be done."""
        if self._graph is not None:
            self._device.api.drop(self._graph)
        self._graph = self._context = None
