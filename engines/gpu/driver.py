"""CUDA through cuda-bindings: memory, one stream of work, graphs, events.

All work goes to one stream, in order. Only ``wait`` waits. Sizes are in bytes, addresses are
plain integers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from specrt.engines.errors import BackendError, ResourceError

INSTALL = "pip install 'specrt[gpu]'"


class Cuda(Protocol):
    """A GPU and a stream. Tests have an implementation with host memory."""

    name: str
    compute_capability: str
    stream: int

    def allocate(self, num_bytes: int) -> int: ...

    def free(self, address: int) -> None: ...

    def free_memory(self) -> int: ...

    def allocate_pinned(self, num_bytes: int) -> int: ...

    def free_pinned(self, address: int) -> None: ...

    def upload(self, target: int, pinned: int, num_bytes: int) -> None: ...

    def download(self, pinned: int, source: int, num_bytes: int) -> None: ...

    def copy(self, target: int, source: int, num_bytes: int) -> None: ...

    def capture(self, enqueue: Callable[[], bool]) -> Any: ...

    def launch(self, graph: Any) -> None: ...

    def drop(self, graph: Any) -> None: ...

    def new_event(self) -> Any: ...

    def drop_event(self, event: Any) -> None: ...

    def record(self, event: Any, is_captured: bool = False) -> None: ...

    def elapsed_ms(self, first: Any, last: Any) -> float | None: ...

    def wait(self) -> None: ...


class RealCuda:
    """The GPU ``ordinal``. Raises ``BackendError`` if the library or a GPU is missing, or CUDA reports an error."""

    def __init__(self, ordinal: int = 0) -> None:
        try:
            from cuda.bindings import runtime
        except ImportError as error:
            raise BackendError(f"device cuda: cuda-bindings is not installed; {INSTALL}") from error
        self._api: Any = runtime
        self._success = runtime.cudaError_t.cudaSuccess
        self._to_device = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._to_host = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._within = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self._call("cudaSetDevice", ordinal)
        attributes = runtime.cudaDeviceAttr
        major = self._call("cudaDeviceGetAttribute", attributes.cudaDevAttrComputeCapabilityMajor, ordinal)
        minor = self._call("cudaDeviceGetAttribute", attributes.cudaDevAttrComputeCapabilityMinor, ordinal)
        self.compute_capability = f"{major}.{minor}"
        self.name = self._call("cudaGetDeviceProperties", ordinal).name.decode(errors="replace").rstrip("\0")
        self.stream = int(self._call("cudaStreamCreateWithFlags", runtime.cudaStreamNonBlocking))

    def _call(self, name: str, *arguments: Any) -> Any:
        """The results of a CUDA function, without its status. Raises ``BackendError``, or ``ResourceError`` if out of
        memory.
        """
        status, *values = getattr(self._api, name)(*arguments)
        if status != self._success:
            self._fail(name, status, arguments)
        return values[0] if values else None

    def _fail(self, name: str, status: Any, arguments: tuple[Any, ...]) -> None:
        if status == self._api.cudaError_t.cudaErrorMemoryAllocation and name in ("cudaMalloc", "cudaMallocHost"):
            place = "the GPU" if name == "cudaMalloc" else "page-locked memory"
            raise ResourceError(
                f"device cuda: {arguments[0]} bytes are needed, more than {place} has free; use a smaller model, or "
                "export with a shorter --max-seq-len"
            )
        _, text = self._api.cudaGetErrorString(status)
        reason = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
        raise BackendError(f"device cuda: {name} failed ({reason}); see 'specrt doctor' for what works on this machine")

    def allocate(self, num_bytes: int) -> int:
        """The address of zeroed memory on the GPU, aligned to 256 bytes."""
        address = int(self._call("cudaMalloc", num_bytes))
        self._call("cudaMemsetAsync", address, 0, num_bytes, self.stream)
        return address

    def free(self, address: int) -> None:
        """Free memory of the GPU. Work that uses it must be done."""
        self._call("cudaFree", address)

    def free_memory(self) -> int:
        """Free bytes of the GPU's memory."""
        return int(self._call("cudaMemGetInfo"))

    def allocate_pinned(self, num_bytes: int) -> int:
        """The address of page-locked host memory, from which copies run asynchronously."""
        return int(self._call("cudaMallocHost", num_bytes))

    def free_pinned(self, address: int) -> None:
        """Free page-locked memory."""
        self._call("cudaFreeHost", address)

    def upload(self, target: int, pinned: int, num_bytes: int) -> None:
        """Enqueue a copy to the GPU. ``pinned`` must not change until a wait."""
        self._call("cudaMemcpyAsync", target, pinned, num_bytes, self._to_device, self.stream)

    def download(self, pinned: int, source: int, num_bytes: int) -> None:
        """Enqueue a copy to the host. It is complete after a wait."""
        self._call("cudaMemcpyAsync", pinned, source, num_bytes, self._to_host, self.stream)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Enqueue a copy on the GPU."""
        self._call("cudaMemcpyAsync", target, source, num_bytes, self._within, self.stream)

    def capture(self, enqueue: Callable[[], bool]) -> Any:
        """Capture the work that ``enqueue`` adds to the stream as a graph, without running it. None if that fails."""
        mode = self._api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", self.stream, mode)
        is_done = False
        try:
            is_done = enqueue()
        finally:
            status, graph = self._api.cudaStreamEndCapture(self.stream)
            launchable = self._instantiated(graph) if is_done and status == self._success else None
            if graph is not None and int(graph):
                self._api.cudaGraphDestroy(graph)
            if launchable is None:
                self._api.cudaGetLastError()  # clears the error of the failed capture
        return launchable

    def _instantiated(self, graph: Any) -> Any:
        status, launchable = self._api.cudaGraphInstantiate(graph, 0)
        return launchable if status == self._success else None

    def launch(self, graph: Any) -> None:
        """Enqueue a captured graph."""
        self._call("cudaGraphLaunch", graph, self.stream)

    def drop(self, graph: Any) -> None:
        """Free a graph. Its runs must be done."""
        self._call("cudaGraphExecDestroy", graph)

    def new_event(self) -> Any:
        """An event, which may be recorded any number of times."""
        return self._call("cudaEventCreate")

    def drop_event(self, event: Any) -> None:
        """Free an event."""
        self._call("cudaEventDestroy", event)

    def record(self, event: Any, is_captured: bool = False) -> None:
        """Record the time at which the stream reaches this point; in a capture, at which each run of the graph does."""
        flags = self._api.cudaEventRecordExternal if is_captured else self._api.cudaEventRecordDefault
        self._call("cudaEventRecordWithFlags", event, self.stream, flags)

    def elapsed_ms(self, first: Any, last: Any) -> float | None:
        """Time between two recorded events; None until the GPU has reached both."""
        status, elapsed = self._api.cudaEventElapsedTime(first, last)
        if status == self._api.cudaError_t.cudaErrorNotReady:
            self._api.cudaGetLastError()  # otherwise the next call would report it
            return None
        if status != self._success:
            self._fail("cudaEventElapsedTime", status, (first, last))
        return float(elapsed)

    def wait(self) -> None:
        """Wait until everything in the stream is done."""
        self._call("cudaStreamSynchronize", self.stream)


@functools.cache
def open_cuda(ordinal: int = 0) -> Cuda:
    """The GPU, opened once in a process. Raises ``BackendError``."""
    return RealCuda(ordinal)
