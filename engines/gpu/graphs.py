"""Work that is submitted as a whole: a round's passes and copies as one CUDA graph, launched with one call.

Inside ``RoundGraphs.together`` nothing is enqueued at once. What the thread uploads, copies, runs and reads is noted,
and submitted at the end or at a read. Work that was submitted before, with the same passes, addresses and sizes, is
captured as a graph; everything else is enqueued as it was noted.

Positions, row indices and random numbers differ from round to round, and the host knows all of them when a round
begins. They go into one page-locked area, from there with one copy to the GPU, and copies within the GPU bring each
part to its place before the pass that needs it. So positions advance on the GPU without a kernel of our own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from specrt.engines.errors import BackendError, ResourceError
from specrt.engines.gpu.device import Device, DeviceArray, Pinned, aligned, decoded
from specrt.engines.interface import Array

if TYPE_CHECKING:
    from specrt.engines.gpu.binding import DeviceBinding

GRAPH_BYTES, ANSWER_BYTES = 512 << 10, 16 << 10  # of what the host writes and reads in a graph
AREA_BYTES = 2 * GRAPH_BYTES + ANSWER_BYTES  # on the host and on the GPU, of a slot's model
MOST_GRAPHS, MOST_SEEN = 128, 512  # of a slot's model; those that were not used longest are dropped

_UPLOAD, _COPY, _RUN, _DOWNLOAD, _MARK = range(5)
_Step = tuple[Any, ...]  # one of them, and its arguments without contents


class RoundGraphs:
    """The graphs of one slot's model, by the steps that they consist of. They belong to a binding and end with it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._steps: list[_Step] = []
        self._contents: list[Array] = []  # of the uploads
        self._graphs: dict[tuple[_Step, ...], Any] = {}
        self._seen: dict[tuple[_Step, ...], None] = {}
        self._area: _Area | None = None
        self._is_off = False

    @contextmanager
    def together(self) -> Iterator[None]:
        """Submit as a whole what this thread enqueues inside."""
        if self._is_off or self._device.collector is not None:
            yield
            return
        self._device.collector = self
        try:
            yield
        finally:  # after an error too: the host counts what it has enqueued
            try:
                self.submit()
            finally:
                self._device.collector = None

    def upload(self, address: int, data: Array) -> None:
        """Note a copy of ``data`` [N] u8 to the GPU."""
        self._steps.append((_UPLOAD, address, data.size))
        self._contents.append(data.copy())

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Note a copy on the GPU."""
        self._steps.append((_COPY, target, source, num_bytes))

    def run(self, binding: DeviceBinding, width: int, rows: int) -> None:
        """Note a pass."""
        self._steps.append((_RUN, binding, width, rows))

    def mark(self, binding: DeviceBinding, number: int) -> None:
        """Note an event of ``binding``."""
        self._steps.append((_MARK, binding, number))

    def read(self, tensors: Sequence[DeviceArray]) -> list[Array]:
        """Submit what was noted and return copies of the tensors, as ``Device.read``."""
        steps, contents = self._taken()
        downloads = tuple((_DOWNLOAD, tensor.address, tensor.num_bytes) for tensor in tensors)
        with self._paused():
            if steps and self._is_launched((*steps, *downloads), contents):
                self._device.wait()
                assert self._area is not None
                return self._area.answers(tensors)
            self._enqueue(steps, contents)
            return self._device.read(tensors)

    def submit(self) -> None:
        """Submit what was noted."""
        steps, contents = self._taken()
        if steps:
            with self._paused():
                if not self._is_launched(steps, contents):
                    self._enqueue(steps, contents)

    def close(self) -> None:
        """Free graphs and memory. Their runs must be done."""
        for graph in self._graphs.values():
            self._device.api.drop(graph)
        self._graphs.clear()
        self._seen.clear()
        if self._area is not None:
            self._area.free()
            self._area = None

    def _taken(self) -> tuple[tuple[_Step, ...], list[Array]]:
        steps, contents = tuple(self._steps), self._contents
        self._steps, self._contents = [], []
        return steps, contents

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self._device.collector = None
        try:
            with self._device.lock:
                yield
        finally:
            self._device.collector = self

    def _enqueue(self, steps: Sequence[_Step], contents: Sequence[Array]) -> None:
        """Each step by itself."""
        data = iter(contents)
        for kind, *arguments in steps:
            if kind == _UPLOAD:
                self._device.upload(arguments[0], next(data))
            elif kind == _COPY:
                self._device.copy(*arguments)
            elif kind == _MARK:
                arguments[0].record(arguments[1])
            else:
                binding, width, rows = arguments
                binding.launch(width, rows)

    def _is_launched(self, steps: tuple[_Step, ...], contents: Sequence[Array]) -> bool:
        """Whether there is a graph of these steps, which is then launched."""
        graph = self._graphs.pop(steps, None)
        if graph is None:
            graph = self._captured(steps)
        if graph is None or self._area is None:
            return False
        self._graphs[steps] = graph  # the one that was used last is last
        self._area.fill(contents)
        self._device.api.launch(graph)
        return True

    def _captured(self, steps: tuple[_Step, ...]) -> Any:
        """A new graph of these steps; None if they are new, do not fit, or cannot be captured."""
        if steps not in self._seen:
            self._seen[steps] = None
            if len(self._seen) > MOST_SEEN:
                del self._seen[next(iter(self._seen))]
            return None
        if not all(step[1].can_capture(*step[2:]) for step in steps if step[0] == _RUN) or not _fit(steps):
            return None
        if len(self._graphs) >= MOST_GRAPHS:
            self._device.wait()
            self._device.api.drop(self._graphs.pop(next(iter(self._graphs))))
        try:
            area = self.reserve()
            graph = self._device.api.capture(lambda: area.enqueue(steps))
        except (BackendError, ResourceError):
            graph = None  # of a call that a capture does not allow, or no memory is left for graphs
        if graph is None:
            self._is_off = True
            warnings.warn("a round cannot be captured as one CUDA graph; its passes run one by one", stacklevel=2)
        return graph

    def reserve(self) -> _Area:
        """Allocate the memory of graphs, if that was not done before."""
        if self._area is None:
            self._area = _Area(self._device)
        return self._area


class _Area:
    """What graphs copy from and to: page-locked memory for uploads and answers, and memory on the GPU for uploads.

    Uploads and answers are one after the other, in the order of their steps. Raises ``ResourceError``.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pinned = Pinned(device.api, GRAPH_BYTES + ANSWER_BYTES)
        try:
            self._staged = device.allocate(GRAPH_BYTES)
        except ResourceError:
            self._pinned.free()
            raise
        self._filled_at = -1  # the number of waits before: until the next one the GPU may be reading

    def fill(self, contents: Sequence[Array]) -> None:
        """Write the uploads of the graph that is launched next."""
        if self._filled_at == self._device.num_waits:
            self._device.wait()
        self._filled_at = self._device.num_waits
        start = 0
        for data in contents:
            self._pinned.bytes[start : start + data.size] = data
            start += aligned(data.size)

    def answers(self, tensors: Sequence[DeviceArray]) -> list[Array]:
        """Copies of the tensors that the last graph read. Call it after a wait."""
        found, start = [], GRAPH_BYTES
        for tensor in tensors:
            found.append(decoded(self._pinned.bytes[start : start + tensor.num_bytes], tensor))
            start += aligned(tensor.num_bytes)
        return found

    def enqueue(self, steps: Sequence[_Step]) -> bool:
        """Enqueue the steps, to be captured. Returns whether the library took each pass."""
        api, start, answer = self._device.api, 0, self._pinned.address + GRAPH_BYTES
        if num_bytes := _total(steps, _UPLOAD):
            api.upload(self._staged, self._pinned.address, num_bytes)
        for kind, *arguments in steps:
            if kind == _UPLOAD:
                address, size = arguments
                api.copy(address, self._staged + start, size)
                start += aligned(size)
            elif kind == _COPY:
                api.copy(*arguments)
            elif kind == _DOWNLOAD:
                source, size = arguments
                api.download(answer, source, size)
                answer += aligned(size)
            elif kind == _MARK:
                arguments[0].record(arguments[1], is_captured=True)
            elif not arguments[0].enqueue_captured(*arguments[1:]):
                return False
        return True

    def free(self) -> None:
        self._device.free([self._staged])
        self._pinned.free()


def _total(steps: Sequence[_Step], kind: int) -> int:
    return sum(aligned(step[-1]) for step in steps if step[0] == kind)


def _fit(steps: Sequence[_Step]) -> bool:
    return _total(steps, _UPLOAD) <= GRAPH_BYTES and _total(steps, _DOWNLOAD) <= ANSWER_BYTES
