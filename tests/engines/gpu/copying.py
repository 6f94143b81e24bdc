"""A binding whose passes are copies, and what tests of a device share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import numpy as np

from specrt.engines.contract import ROW_INDICES, ROWS, Contract, TensorSpec
from specrt.engines.gpu.binding import DeviceBinding
from specrt.engines.gpu.device import Device, DeviceArray
from specrt.engines.gpu.graphs import RoundGraphs
from specrt.engines.interface import Array

SIZE = 1024
CONTRACT = Contract(
    (TensorSpec(ROW_INDICES, "int64", (ROWS,)),), (TensorSpec("copied", "int64", (ROWS,)),), {"width": 4, "rows": 4}
)


class Copying(DeviceBinding):
    """A binding whose pass copies its input, on the GPU, as the run of a graph or an engine would."""

    def _launch(self, width: int, rows: int) -> None:
        source, target = (self.memory[name] for name in (ROW_INDICES, "copied"))
        assert isinstance(source, DeviceArray) and isinstance(target, DeviceArray)
        self.device.api.copy(target.address, source.address, 8 * rows)


class Capturable(Copying):
    """One whose passes may be a part of a larger graph, from the first on."""

    def __init__(self, device: Device) -> None:
        super().__init__(device, CONTRACT, {})
        self.graphs = RoundGraphs(device)

    def together(self) -> AbstractContextManager[None]:
        return self.graphs.together()

    def can_capture(self, width: int, rows: int) -> bool:
        return True

    def enqueue_captured(self, width: int, rows: int) -> bool:
        self._launch(width, rows)
        return True

    def _release(self) -> None:
        self.device.wait()
        self.graphs.close()


def in_four_threads(work: Callable[[int], None]) -> None:
    """``work`` with 0 to 3, all at a time. Raises what one of them raises."""
    together = threading.Barrier(4)

    def begin(number: int) -> None:
        together.wait()
        work(number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(begin, range(4)))


def content(array: DeviceArray) -> Array:
    return array.device.read([array])[0]


def check_graph(device: Device, array: DeviceArray) -> None:
    """Nothing runs during a capture; each launch runs on the current contents of memory."""
    api, first, second = device.api, array[0:4], array[4:8]
    device.upload(array.address, np.zeros(SIZE, np.int64))
    device.wait()

    def enqueue() -> bool:
        api.copy(second.address, first.address, 32)
        return True

    graph = api.capture(enqueue)
    assert graph is not None
    assert content(second).tolist() == [0] * 4
    for value in (7, 8):
        device.upload(first.address, np.full(4, value))
        api.launch(graph)
        assert content(second).tolist() == [value] * 4
    device.wait()
    api.drop(graph)
