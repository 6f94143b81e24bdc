"""A GPU for tests without one: its memory is the host's, at real addresses; its stream runs only at a wait.

So a read without a wait sees what was there before, and page-locked memory that is overwritten too early shows in the
answer. It refuses what CUDA refuses, and counts.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from ctypes import c_uint8, memmove
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specrt.engines.interface import Array

ALIGNMENT = 256
POISON = 0x7F  # what freed memory is filled with: as a float, a huge number


@dataclass(eq=False)
class Event:
    """``time`` is None after it is recorded until the stream reaches it."""

    time: float | None = None
    is_recorded: bool = False
    is_dropped: bool = False


@dataclass
class Graph:
    """What was captured, to be run again and again."""

    work: list[Callable[[], None]]
    events: list[Event]
    is_dropped: bool = False


@dataclass
class SimulatedCuda:
    """See ``specrt.engines.gpu.driver.Cuda``. ``counts`` has calls by name, and bytes by direction."""

    name: str = "simulated GPU"
    compute_capability: str = "8.9"
    stream: int = 77
    can_capture: bool = True
    events: list[Event] = field(default_factory=list)
    graphs: list[Graph] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    sizes: dict[int, int] = field(default_factory=dict)
    pinned: dict[int, int] = field(default_factory=dict)
    _memory: dict[int, Array] = field(default_factory=dict)
    _queue: list[Callable[[], None]] = field(default_factory=list)
    _capturing: list[Callable[[], None]] | None = None
    _capturing_thread: int = 0
    _captured_events: list[Event] = field(default_factory=list)

    @property
    def num_calls(self) -> int:
        """Calls of the driver and of the library so far."""
        return sum(count for name, count in self.counts.items() if not name.endswith(" bytes"))

    def _allocate(self, num_bytes: int) -> int:
        assert self._capturing is None, "cudaMalloc is not allowed while a stream is captured"
        assert num_bytes > 0
        raw = np.full(num_bytes + ALIGNMENT, POISON, np.uint8)
        address = -(-raw.ctypes.data // ALIGNMENT) * ALIGNMENT
        self._memory[address] = raw
        return address

    def allocate(self, num_bytes: int) -> int:
        self.counts["allocate"] += 1
        address = self._allocate(num_bytes)
        self.sizes[address] = num_bytes
        self.enqueue(lambda: memmove(address, bytes(num_bytes), num_bytes))
        return address

    def free(self, address: int) -> None:
        self.counts["free"] += 1
        assert self._capturing is None, "cudaFree is not allowed while a stream is captured"
        assert not self._queue, "memory is freed while work that may use it is under way"
        self._free(address, self.sizes)

    def free_memory(self) -> int:
        return (1 << 30) - sum(self.sizes.values())

    def allocate_pinned(self, num_bytes: int) -> int:
        self.counts["allocate_pinned"] += 1
        address = self._allocate(num_bytes)
        self.pinned[address] = num_bytes
        return address

    def free_pinned(self, address: int) -> None:
        assert self._capturing is None, "cudaFreeHost is not allowed while a stream is captured"
        assert not self._queue
        self._free(address, self.pinned)

    def _free(self, address: int, sizes: dict[int, int]) -> None:
        del sizes[address]
        self._memory.pop(address)[:] = POISON

    def allocate_of_library(self, num_bytes: int) -> int:
        """What a library allocates for itself; not counted, but not allowed in a capture either."""
        return self._allocate(num_bytes)

    def free_of_library(self, address: int) -> None:
        self._memory.pop(address)

    def view(self, address: int, num_bytes: int) -> Array:
        """The memory at an address, as bytes."""
        return np.ctypeslib.as_array((c_uint8 * num_bytes).from_address(address))

    def is_within(self, sizes: dict[int, int], address: int, num_bytes: int) -> bool:
        """Whether the bytes are in one piece of memory that is allocated."""
        return any(start <= address and address + num_bytes <= start + size for start, size in sizes.items())

    def enqueue(self, work: Callable[[], Any]) -> None:
        """Put work into the stream, or into the graph that is being captured."""
        is_ours = self._capturing is None or self._capturing_thread == threading.get_ident()
        assert is_ours, "the work of another thread would become a part of the graph"
        (self._queue if self._capturing is None else self._capturing).append(work)

    def upload(self, target: int, pinned: int, num_bytes: int) -> None:
        self._copy("upload", self.sizes, target, self.pinned, pinned, num_bytes)

    def download(self, pinned: int, source: int, num_bytes: int) -> None:
        self._copy("download", self.pinned, pinned, self.sizes, source, num_bytes)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self._copy("copy", self.sizes, target, self.sizes, source, num_bytes)

    def _copy(self, kind: str, to: dict[int, int], target: int, of: dict[int, int], source: int, size: int) -> None:
        def run() -> None:
            assert self.is_within(to, target, size), f"{kind} to memory that is not allocated"
            assert self.is_within(of, source, size), f"{kind} from memory that is not allocated"
            self.counts[f"{kind} bytes"] += size
            memmove(target, source, size)

        assert self.is_within(to, target, size), f"{kind} to memory that is not allocated"
        assert self.is_within(of, source, size), f"{kind} from memory that is not allocated"
        self.counts[kind] += 1
        self.enqueue(run)

    def capture(self, enqueue: Callable[[], bool]) -> Graph | None:
        self.counts["capture"] += 1
        if not self.can_capture:
            return None
        assert self._capturing is None, "a stream is captured once at a time"
        self._capturing, self._capturing_thread, self._captured_events = [], threading.get_ident(), []
        try:
            is_done = enqueue()
        finally:
            work, self._capturing = self._capturing, None
        if not is_done:
            return None
        self.graphs.append(Graph(work, self._captured_events))
        return self.graphs[-1]

    def launch(self, graph: Graph) -> None:
        assert not graph.is_dropped
        assert self._capturing is None, "no graph is launched into another one"
        self.counts["launch"] += 1
        for event in graph.events:
            event.time, event.is_recorded = None, True
        self._queue.extend(graph.work)

    def drop(self, graph: Graph) -> None:
        assert not self._queue, "a graph is dropped that may be running"
        graph.is_dropped = True

    def new_event(self) -> Event:
        self.events.append(Event())
        return self.events[-1]

    def drop_event(self, event: Event) -> None:
        assert not event.is_dropped
        assert not any(event in graph.events for graph in self.graphs if not graph.is_dropped), "a graph records it"
        event.is_dropped = True

    def record(self, event: Event, is_captured: bool = False) -> None:
        assert not event.is_dropped and is_captured == (self._capturing is not None)
        if is_captured:
            self._captured_events.append(event)
        else:
            self.counts["record"] += 1
            event.time, event.is_recorded = None, True

        def note() -> None:
            event.time = time.perf_counter()

        self.enqueue(note)

    def elapsed_ms(self, first: Event, last: Event) -> float | None:
        self.counts["elapsed"] += 1
        assert first.is_recorded and last.is_recorded, "cudaErrorInvalidResourceHandle"
        if first.time is None or last.time is None:
            return None
        return (last.time - first.time) * 1e3

    def wait(self) -> None:
        assert self._capturing is None, "nobody may wait while a stream is captured"
        self.counts["wait"] += 1
        while self._queue:
            self._queue.pop(0)()
