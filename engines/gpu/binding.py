"""A slot's tensors on a device, allocated and bound once: the common part of bindings of all libraries."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from specrt.engines.contract import ROWS, WIDTH, Buffer, Contract, TensorSpec, plan_buffers
from specrt.engines.errors import SpecrtError
from specrt.engines.gpu.device import Device, DeviceArray, aligned, encoded
from specrt.engines.interface import Array, Memory, begins_with
from specrt.engines.samplers import HOST_WRITTEN

_FEW_ITEMS = 16  # more items than this are sent as the whole tensor


class DeviceBinding:
    """See ``specrt.engines.interface.Binding``. Backends implement ``_launch``, which runs under the device's lock.

    Tensors that the host writes are in one block, the mailbox, which is copied to the device at once.
    """

    is_async = True

    def __init__(self, device: Device, contract: Contract, shared: Mapping[str, Any]) -> None:
        self.device, self.contract = device, contract
        self._tensors: dict[str, DeviceArray] = {}
        self._owned: list[int] = []
        self._events: list[Any] = []
        self._last = (1, 1)
        self.turn = 0  # of contracts that swap buffers: 1 after an odd number of passes
        self._is_open = True
        own = []
        for buffer in plan_buffers(contract, frozenset(shared)):
            if buffer.owner == "shared":
                self._tensors[buffer.name] = self._checked(buffer, shared[buffer.name])
            else:
                own.append(buffer)
        try:
            self._allocate([buffer for buffer in own if buffer.name not in HOST_WRITTEN])
            self._mail_address, self._mail = self._allocate_mailbox([b for b in own if b.name in HOST_WRITTEN])
        except SpecrtError:
            device.free(self._owned)
            raise
        self.host: Mapping[str, Array] = {
            name: tensor.mirror for name, tensor in self._tensors.items() if tensor.mirror is not None
        }

    @property
    def memory(self) -> Mapping[str, Memory]:
        """See ``Binding.memory``."""
        return self._tensors

    def _checked(self, buffer: Buffer, memory: Any) -> DeviceArray:
        if not isinstance(memory, DeviceArray) or memory.device is not self.device:
            raise ValueError(f"shared buffer {buffer.name}: got memory of another device, expected this one's")
        if memory.dtype != buffer.dtype or not begins_with(memory.shape, buffer.shape):
            raise ValueError(
                f"shared buffer {buffer.name}: got {memory.dtype}{list(memory.shape)}, "
                f"expected {buffer.dtype}{list(buffer.shape)}"
            )
        return memory

    def _allocate(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            self._owned.append(self.device.allocate(buffer.num_bytes))
            self._tensors[buffer.name] = DeviceArray(self.device, self._owned[-1], buffer.shape, buffer.dtype)

    def _allocate_mailbox(self, buffers: Sequence[Buffer]) -> tuple[int, Array]:
        sizes = [aligned(buffer.num_bytes) for buffer in buffers]
        mail = np.zeros(sum(sizes), np.uint8)
        if not buffers:
            return 0, mail
        address = self.device.allocate(mail.size)
        self._owned.append(address)
        for buffer, start in zip(buffers, itertools.accumulate([0, *sizes[:-1]]), strict=True):
            mirror = mail[start : start + buffer.num_bytes].view(buffer.dtype).reshape(buffer.shape)
            self._tensors[buffer.name] = DeviceArray(self.device, address + start, buffer.shape, buffer.dtype, mirror)
        return address, mail

    def upload(self, *names: str) -> None:
        """See ``Binding.upload``."""
        if not names and self._mail.size:
            self.device.upload(self._mail_address, self._mail)
        for name in names:
            tensor = self._tensors[name]
            self.device.upload(tensor.address, self.host[name])

    def upload_items(self, name: str, indices: Sequence[int]) -> None:
        """See ``Binding.upload_items``."""
        if len(indices) > _FEW_ITEMS:
            return self.upload(name)
        address, mirror = self._tensors[name].address, self.host[name]
        for index in indices:
            self.device.upload(address + index * mirror.itemsize, mirror[index : index + 1])
        return None

    def write(self, name: str, values: Array, start: int = 0) -> None:
        """See ``Binding.write``."""
        tensor = self._tensors[name][start:]
        if not begins_with(tensor.shape, values.shape):
            raise ValueError(f"{name}: got values of shape {list(values.shape)}, expected rows of {list(tensor.shape)}")
        if tensor.mirror is not None:
            tensor.mirror[: len(values)] = values
        self.device.upload(tensor.address, encoded(values, tensor.dtype))

    def take(self, name: str, start: int, source: Any) -> None:
        """See ``Binding.take``."""
        tensor = self._tensors[name]
        first = start * (tensor.num_bytes // int(np.prod(tensor.shape)))
        if source.dtype != tensor.dtype or first + source.num_bytes > tensor.num_bytes:
            raise ValueError(f"{name}: {source.dtype}{list(source.shape)} at item {start} is not part of it")
        self.device.copy(tensor.address + first, source.address, source.num_bytes)

    def run(self, width: int, rows: int) -> None:
        """See ``Binding.run``."""
        if not self._is_open:
            raise RuntimeError("this binding is closed")
        limits = self.contract.limits
        if not (1 <= width <= limits[WIDTH] and 1 <= rows <= limits[ROWS]):
            raise ValueError(f"pass of {width} tokens and {rows} rows: at most {limits[WIDTH]} and {limits[ROWS]}")
        if (collector := self.device.collector) is not None:
            collector.run(self, width, rows)
        else:
            self.launch(width, rows)
        self._last = (width, rows)
        if self.contract.swaps:
            self.turn ^= 1
            for written, read in self.contract.swaps:
                self._tensors[written], self._tensors[read] = self._tensors[read], self._tensors[written]

    def launch(self, width: int, rows: int) -> None:
        """Enqueue a pass at once."""
        with self.device.lock:
            self._launch(width, rows)

    def together(self) -> AbstractContextManager[None]:
        """See ``Binding.together``. Backends whose passes can be captured override it."""
        return nullcontext()

    def can_capture(self, width: int, rows: int) -> bool:
        """Whether such a pass can be a part of a larger CUDA graph now.

        Its tensors must have the same addresses in each run: a graph repeats those of its capture.
        """
        return False

    def enqueue_captured(self, width: int, rows: int) -> bool:
        """Enqueue such a pass while the stream is captured. Returns whether the library took it."""
        raise NotImplementedError

    def _launch(self, width: int, rows: int) -> None:
        raise NotImplementedError

    def read(self, *names: str) -> list[Array]:
        """See ``Binding.read``."""
        return self.device.read([self._part(name) for name in names])

    def mark(self, number: int) -> None:
        """See ``Binding.mark``."""
        if (collector := self.device.collector) is not None:
            collector.mark(self, number)
        else:
            self.record(number)

    def record(self, number: int, is_captured: bool = False) -> None:
        """Record an event at once, or in each run of the graph that is being captured."""
        api = self.device.api
        with self.device.lock:
            if not self._events:
                self._events = [api.new_event(), api.new_event()]
            api.record(self._events[number], is_captured)

    def elapsed_ms(self) -> float | None:
        """See ``Binding.elapsed_ms``."""
        return self.device.api.elapsed_ms(*self._events) if self._events else None

    def _part(self, name: str) -> DeviceArray:
        """The part of a tensor that the last pass used, so that only that is copied to the host."""
        tensor, spec = self._tensors[name], self._spec(name)
        width, rows = self._last
        shape = spec.resolve({**self.contract.limits, WIDTH: width, ROWS: rows})
        return DeviceArray(self.device, tensor.address, shape, tensor.dtype)

    def _spec(self, name: str) -> TensorSpec:
        return next(t for t in (*self.contract.inputs, *self.contract.outputs) if t.name == name)

    def address(self, tensor: TensorSpec) -> int:
        """The address of a tensor; for an aliased output that of its input."""
        return self._tensors[tensor.alias or tensor.name].address

    def shapes(self, width: int, rows: int) -> dict[str, tuple[int, ...]]:
        """The shape of each input in a pass."""
        dims = {**self.contract.limits, WIDTH: width, ROWS: rows}
        return {tensor.name: tensor.resolve(dims) for tensor in self.contract.inputs}

    def close(self) -> None:
        """See ``Binding.close``."""
        if self._is_open:
            self._is_open = False
            self._release()
            self.device.free(self._owned)
            for event in self._events:
                self.device.api.drop_event(event)
            self._owned.clear()
            self._events.clear()
            self._tensors.clear()
            self.host = {}

    def _release(self) -> None:
        """Release a backend's resources for the binding. Work that uses them may still be running."""
