"""The CUDA driver through our device and bindings: copies, page-locked memory, captures, events, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from specrt.engines.contract import ROWS, Contract, TensorSpec
from specrt.engines.gpu import device as gpu
from specrt.engines.gpu.binding import DeviceBinding
from specrt.engines.gpu.device import Device, DeviceArray
from specrt.engines.interface import Array
from specrt.tools.gpu_check.experiment import Failed, Notes
from specrt.tools.gpu_check.kit import Kit

_COPIED = Contract(
    (TensorSpec("source", "float32", (ROWS, 4096)),),
    (TensorSpec("copy", "float32", (ROWS, 4096)),),
    {"width": 1, ROWS: 8},
)


class _Copy(DeviceBinding):
    """A binding whose pass copies its input 50 times."""

    def _launch(self, width: int, rows: int) -> None:
        source, copy = (self._tensors[name] for name in ("source", "copy"))
        for _ in range(50):
            self.device.copy(copy.address, source.address, source.num_bytes)


def check_driver(kit: Kit, notes: Notes) -> None:
    """Everything that the runtime asks of CUDA, each with data that would show a wrong order."""
    device = gpu.open_device()
    notes.add("gpu", {"name": device.api.name, "compute capability": device.api.compute_capability})
    for name, check in _CHECKS.items():
        check(device)
        notes.add(name, "as expected")
    notes.add("ms of 50 copies of 128 KB", _events(device))


def _expect(found: Array, expected: Array, what: str) -> None:
    if not np.array_equal(found, expected):
        raise Failed(f"{what}: {int((found != expected).sum())} of {expected.size} items differ")


def _array(device: Device, size: int) -> DeviceArray:
    return DeviceArray(device, device.allocate(size * 8), (size,), "int64")


def _copies(device: Device) -> None:
    for size in (1, 513, 400_000):
        first, second = _array(device, size), _array(device, size)
        values = np.random.default_rng(size).integers(0, 1 << 40, size)
        _expect(device.read([first])[0], np.zeros(size, np.int64), "new memory is zero")
        device.upload(first.address, values)
        device.copy(second.address, first.address, first.num_bytes)
        _expect(device.read([second])[0], values, f"a copy of {size} items")
        device.free([first.address, second.address])


def _pinned_reuse(device: Device) -> None:
    """Uploads of four times the page-locked area, from memory that changes after each."""
    values, places = np.zeros(32_768, np.int64), [_array(device, 32_768) for _ in range(64)]
    for number, place in enumerate(places):
        values[:] = number
        device.upload(place.address, values)
    values[:] = -1
    for number, place in enumerate(places):
        _expect(device.read([place])[0], np.full(32_768, number), f"upload {number} of 64")
    device.free([place.address for place in places])


def _captures(device: Device) -> None:
    """A graph runs when it is launched, not when it is captured, and sees what memory holds then."""
    first, second, api = _array(device, 1000), _array(device, 1000), device.api

    def enqueue() -> bool:
        api.copy(second.address, first.address, first.num_bytes)
        return True

    device.upload(first.address, np.full(1000, 1))
    device.wait()
    graph = api.capture(enqueue)
    if graph is None:
        raise Failed("a copy cannot be captured as a CUDA graph")
    _expect(device.read([second])[0], np.zeros(1000), "memory after a capture alone")
    for value in (2, 3):
        device.upload(first.address, np.full(1000, value))
        api.launch(graph)
        _expect(device.read([second])[0], np.full(1000, value), f"launch {value - 1} of a graph")
    device.wait()
    api.drop(graph)
    if api.capture(lambda: False) is not None:
        raise Failed("a capture whose work failed gave a graph")
    device.upload(first.address, np.full(1000, 9))
    _expect(device.read([first])[0], np.full(1000, 9), "an upload after a failed capture")
    device.free([first.address, second.address])


def _threads(device: Device) -> None:
    """Two threads that upload, copy and read at once, each in memory of its own."""
    failures: list[str] = []

    def work(seed: int) -> None:
        rng, first, second = np.random.default_rng(seed), _array(device, 5000), _array(device, 5000)
        try:
            for _ in range(60):
                values = rng.integers(0, 1 << 40, 5000)
                device.upload(first.address, values)
                device.copy(second.address, first.address, first.num_bytes)
                _expect(device.read([second])[0], values, f"thread {seed}")
        except Exception as error:  # of any kind: it is the answer
            failures.append(f"{type(error).__name__}: {error}")
        device.free([first.address, second.address])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise Failed(failures[0])


def _events(device: Device) -> float:
    """Milliseconds between the marks around a pass, in two bindings that are used in turn.

    A time that is asked for too early is unknown, or negative in no case, and never an error.
    """
    bindings = [_Copy(device, _COPIED, {}) for _ in range(2)]
    values = np.random.default_rng(3).normal(size=(8, 4096)).astype(np.float32)
    for binding in bindings:
        binding.write("source", values)
        binding.run(1, 8)
        binding.mark(0)
    for binding in bindings:
        binding.run(1, 8)
        binding.mark(1)
        if (early := binding.elapsed_ms()) is not None and early < 0:
            raise Failed(f"events: {early} ms before a wait, expected a time or none")
    for binding in bindings:
        _expect(binding.read("copy")[0], values, "a binding's pass")
    elapsed = [binding.elapsed_ms() for binding in bindings]
    for binding in bindings:
        binding.close()
    if None in elapsed or not all(0 < (ms or 0) < 1e4 for ms in elapsed):
        raise Failed(f"events: {elapsed} ms between two marks")
    return elapsed[-1] or 0.0


_CHECKS: dict[str, Callable[[Device], None]] = {
    "copies": _copies,
    "page-locked memory used again": _pinned_reuse,
    "captures": _captures,
    "two threads": _threads,
}
