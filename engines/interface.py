"""The interface between the round and the backends: a backend loads engines, an engine opens bindings, which run.

Weights belong to the engine and are shared; KV, inputs and outputs belong to a binding, one for each open slot. A
sampler is an engine too: it is opened on the memory of the model pass that it verifies.

On a device ``run`` returns before the pass is done. What the host writes goes there by ``upload``, and ``read`` is the
only place where the host waits. On the CPU all memory is the host's, and both cost nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from specrt.engines.contract import INPUT_IDS, POSITION_IDS, ROW_INDICES, SEQLENS_K, TOTAL_SEQUENCE_LENGTH, Contract

Array = npt.NDArray[Any]

CPU, CUDA = "cpu", "cuda"
DEVICES = (CPU, CUDA)


class Memory(Protocol):
    """A tensor's memory, in whatever place: other bindings may be opened on it. On the CPU it is the array itself."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __len__(self) -> int:
        """The first dimension."""
        ...

    def __getitem__(self, rows: slice) -> Any:
        """The memory of some rows of it."""
        ...


class Binding(Protocol):
    """One slot's memory, bound once. Not thread-safe: a binding serves one sequence at a time."""

    @property
    def is_async(self) -> bool:
        """Whether a pass may still be under way when ``run`` returns: its ids are known later, and reading waits."""
        ...

    @property
    def host(self) -> Mapping[str, Array]:
        """What the host writes before a pass, by tensor name, at its largest shape; a pass uses the leading part.

        On the CPU all tensors are in it.
        """
        ...

    @property
    def memory(self) -> Mapping[str, Memory]:
        """Every tensor's memory, for other bindings to share."""
        ...

    def upload(self, *names: str) -> None:
        """What was written in ``host`` counts for passes from here on: for tensors ``names``, or all of its own."""
        ...

    def upload_items(self, name: str, indices: Sequence[int]) -> None:
        """The same for single items of a tensor with one dimension."""
        ...

    def write(self, name: str, values: Array) -> None:
        """Write the leading rows of any tensor, for passes from here on."""
        ...

    def take(self, name: str, start: int, source: Memory) -> None:
        """Copy ``source`` to the items of tensor ``name`` from ``start`` on, without a way over the host."""
        ...

    def run(self, width: int, rows: int) -> None:
        """Run one pass of ``width`` tokens that returns ``rows`` rows. Allocates nothing for widths seen before."""
        ...

    def read(self, *names: str) -> list[Array]:
        """Wait, and give tensors as far as this binding's last pass used them; on the CPU more, which means nothing."""
        ...

    def mark(self, number: int) -> None:
        """Note when what was enqueued before is done: ``number`` 0 or 1."""
        ...

    def elapsed_ms(self) -> float | None:
        """From mark 0 to mark 1 in ms; None while the device has not come to both."""
        ...

    def close(self) -> None:
        """Free its memory. Closing twice is allowed; running afterwards raises ``RuntimeError``."""
        ...


class Engine(Protocol):
    """A loaded graph with its weights."""

    def open(self, shared: Mapping[str, Any] | None = None) -> Binding:
        """Allocate and bind the buffers of a slot; tensors named in ``shared`` use that memory instead of their own.

        ``shared`` may name other tensors too. Raises ``ValueError`` for shared memory that does not fit the contract.
        """
        ...


class Backend(Protocol):
    """A library on a device, opened for one bundle.

    Backends on one ``device`` share its memory, whatever their libraries: a binding may be opened on another's memory.
    """

    name: str
    device: str

    def load(self, graph: str, contract: Contract, threads: int | None = None) -> Engine:
        """Load one graph, by its file's path in the bundle; ``threads`` may differ from the backend's.

        Raises ``BundleError`` or ``BackendError`` where it cannot be loaded or is not that of ``contract``.
        """
        ...


class HostBinding:
    """The part of a binding that is the same where all memory is the host's."""

    is_async = False
    host: Mapping[str, Array]
    _marks: tuple[float, float] = (0.0, 0.0)

    @property
    def memory(self) -> Mapping[str, Array]:
        return self.host

    def upload(self, *names: str) -> None:
        """Nothing to do: passes read what the host writes."""

    def upload_items(self, name: str, indices: Sequence[int]) -> None:
        """Nothing to do, either."""

    def write(self, name: str, values: Array) -> None:
        """See ``Binding.write``."""
        self.host[name][: len(values)] = values

    def take(self, name: str, start: int, source: Memory) -> None:
        """See ``Binding.take``."""
        items = np.asarray(source).reshape(-1)
        self.host[name].reshape(-1)[start : start + items.size] = items

    def read(self, *names: str) -> list[Array]:
        """See ``Binding.read``: the memory itself, at its largest shape."""
        return [self.host[name] for name in names]

    def mark(self, number: int) -> None:
        """See ``Binding.mark``."""
        now = time.perf_counter()
        self._marks = (self._marks[0], now) if number else (now, now)

    def elapsed_ms(self) -> float:
        """See ``Binding.elapsed_ms``."""
        return (self._marks[1] - self._marks[0]) * 1e3


def write_pass(host: Mapping[str, Array], ids: Array, start: int, rows: int) -> None:
    """Write the inputs of a pass over ``ids`` [M] after ``start`` tokens that returns the logits of its last rows."""
    width = len(ids)
    host[INPUT_IDS][0, :width] = ids
    host[POSITION_IDS][0, :width] = np.arange(start, start + width)
    host[ROW_INDICES][:rows] = np.arange(width - rows, width)
    if SEQLENS_K in host:  # the standard dialect takes the length from the positions
        host[SEQLENS_K][0], host[TOTAL_SEQUENCE_LENGTH][0] = start + width - 1, start + width


def allocate(shape: tuple[int, ...], dtype: str) -> Array:
    """Zeroed memory aligned to a cache line."""
    count = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.zeros(count + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + count].view(dtype).reshape(shape)


def check_shared(name: str, array: Array, shape: tuple[int, ...], dtype: str) -> None:
    """Raise ``ValueError`` unless ``array`` is contiguous, of this dtype, and begins with an array of ``shape``.

    It may be longer in its first dimension: a sampler for fewer rows reads the first rows of a pass.
    """
    if not isinstance(array, np.ndarray):
        raise ValueError(f"shared buffer {name}: got memory of a device, expected the host's, {dtype}{list(shape)}")
    if not array.flags.c_contiguous or array.dtype != np.dtype(dtype) or not begins_with(array.shape, shape):
        raise ValueError(
            f"shared buffer {name}: got {array.dtype}{list(array.shape)}, expected contiguous {dtype}{list(shape)}"
        )


def begins_with(whole: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether the first rows of a tensor of shape ``whole`` are one of ``shape``."""
    return len(whole) == len(shape) and whole[1:] == shape[1:] and whole[0] >= shape[0]
