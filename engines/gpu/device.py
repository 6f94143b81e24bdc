"""A GPU's memory and stream, shared by the bindings of all libraries.

The host writes to ordinary memory. An upload copies it to a page-locked area, piece by piece, and enqueues a copy from
there. The area is reused only after a wait, so no unread data is overwritten.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from ctypes import c_uint8
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np

from specrt.engines.contract import ITEM_BYTES
from specrt.engines.gpu import driver
from specrt.engines.gpu.driver import Cuda
from specrt.engines.interface import Array

ALIGNMENT = 256  # bytes: what TensorRT expects of an address
UPLOAD_BYTES = 4 << 20
READ_BYTES = 1 << 20


def aligned(num_bytes: int) -> int:
    """``num_bytes`` rounded up to the alignment of tensors."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class DeviceArray:
    """A tensor in a GPU's memory. ``mirror`` is its copy on the host, for tensors that the host writes."""

    device: Device
    address: int
    shape: tuple[int, ...]
    dtype: str
    mirror: Array | None = None

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> DeviceArray:
        start, stop, step = rows.indices(len(self))
        if step != 1 or stop < start:
            raise ValueError(f"rows {rows}: expected some that follow each other")
        row_bytes = prod(self.shape[1:]) * ITEM_BYTES[self.dtype]
        mirror = None if self.mirror is None else self.mirror[rows]
        return DeviceArray(
            self.device, self.address + start * row_bytes, (stop - start, *self.shape[1:]), self.dtype, mirror
        )


class Pinned:
    """Page-locked host memory, freed with the object."""

    def __init__(self, api: Cuda, num_bytes: int) -> None:
        self._api, self.num_bytes = api, num_bytes
        self.address = api.allocate_pinned(num_bytes)
        self.bytes = np.ctypeslib.as_array((c_uint8 * num_bytes).from_address(self.address))

    def free(self) -> None:
        self._api.free_pinned(self.address)


class Collector(Protocol):
    """Takes what a thread would enqueue, to submit it later: see ``specrt.engines.gpu.graphs``."""

    def upload(self, address: int, data: Array) -> None: ...

    def copy(self, target: int, source: int, num_bytes: int) -> None: ...

    def run(self, binding: Any, width: int, rows: int) -> None: ...

    def mark(self, binding: Any, number: int) -> None: ...

    def read(self, tensors: Sequence[DeviceArray]) -> list[Array]: ...

    def submit(self) -> None: ...


class Device:
    """A GPU with its stream. Methods may be called from several threads: ``lock`` is held while work is enqueued.

    ``num_waits`` counts the waits for all work.
    """

    def __init__(self, api: Cuda) -> None:
        self.api = api
        self.lock = threading.RLock()
        self.num_waits = 0
        self._thread = threading.local()
        self._uploads, self._used_bytes = Pinned(api, UPLOAD_BYTES), 0
        self._inbox = Pinned(api, READ_BYTES)
        self._scratch: list[tuple[int, int]] = []  # (address, bytes), the largest last; older ones are still bound

    @property
    def collector(self) -> Collector | None:
        """What takes this thread's work; None if it is enqueued at once."""
        return getattr(self._thread, "collector", None)

    @collector.setter
    def collector(self, collector: Collector | None) -> None:
        self._thread.collector = collector

    def upload(self, address: int, values: Array) -> None:
        """Enqueue a copy of ``values`` to the GPU. They may be changed afterwards."""
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        if (collector := self.collector) is not None:
            return collector.upload(address, data)
        with self.lock:
            for start in range(0, data.size, UPLOAD_BYTES):
                self._upload(address + start, data[start : start + UPLOAD_BYTES])

    def _upload(self, address: int, data: Array) -> None:
        if self._used_bytes + data.size > UPLOAD_BYTES:
            self.wait()
        start = self._used_bytes
        self._used_bytes += aligned(data.size)
        self._uploads.bytes[start : start + data.size] = data
        self.api.upload(address, self._uploads.address + start, data.size)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Enqueue a copy on the GPU."""
        if (collector := self.collector) is not None:
            return collector.copy(target, source, num_bytes)
        with self.lock:
            self.api.copy(target, source, num_bytes)

    def read(self, tensors: Sequence[DeviceArray]) -> list[Array]:
        """Wait once and return copies of the tensors. bfloat16 is converted to float32."""
        if (collector := self.collector) is not None:
            return collector.read(tensors)
        with self.lock:
            starts, end = [], 0
            for tensor in tensors:
                starts.append(end)
                end += aligned(tensor.num_bytes)
            if end > self._inbox.num_bytes:
                self.wait()
                self._inbox.free()
                self._inbox = Pinned(self.api, end)
            for start, tensor in zip(starts, tensors, strict=True):
                self.api.download(self._inbox.address + start, tensor.address, tensor.num_bytes)
            self.wait()
            found = zip(starts, tensors, strict=True)
            return [decoded(self._inbox.bytes[start : start + t.num_bytes], t) for start, t in found]

    def wait(self) -> None:
        """Wait for all enqueued work."""
        self.submit()
        with self.lock:
            self.api.wait()
            self._used_bytes = 0
            self.num_waits += 1

    def submit(self) -> None:
        """Enqueue what this thread's collector has taken, if it has one."""
        if (collector := self.collector) is not None:
            collector.submit()

    def allocate(self, num_bytes: int) -> int:
        """The address of zeroed memory on the GPU."""
        with self.lock:
            return self.api.allocate(num_bytes)

    def free(self, addresses: Sequence[int]) -> None:
        """Wait for all work, then free memory."""
        with self.lock:
            self.wait()
            for address in addresses:
                self.api.free(address)

    def scratch(self, num_bytes: int) -> tuple[int, int]:
        """(address, bytes) of working memory that all contexts share: they never run at once.

        If it must grow, earlier contexts keep the old memory.
        """
        with self.lock:
            if not self._scratch or self._scratch[-1][1] < num_bytes:
                self._scratch.append((self.api.allocate(num_bytes), num_bytes))
            return self._scratch[-1]


def decoded(data: Array, tensor: DeviceArray) -> Array:
    if tensor.dtype != "bfloat16":
        return data.copy().view(tensor.dtype).reshape(tensor.shape)
    return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)


def encoded(values: Array, dtype: str) -> Array:
    """``values`` in ``dtype``; bfloat16 as its bits, truncated."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(values, dtype)
    bits: Any = np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16
    return bits.astype(np.uint16)  # type: ignore[no-any-return]


@functools.cache
def open_device(ordinal: int = 0) -> Device:
    """The GPU, opened once in a process. Raises ``BackendError`` if there is none."""
    return Device(driver.open_cuda(ordinal))
