"""The interface between the round and the backends: a backend loads engines, an engine opens bindings, which run.

Weights belong to the engine and are shared; KV, inputs and outputs belong to a binding, one for each open slot. A
sampler is an engine too: it is opened on the memory of the model pass that it verifies.

On a device ``run`` returns before the pass is done, ``upload`` copies what the host wrote, and only ``read`` waits for
the device. On the CPU all memory is the host's, and both are free.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from specrt.engines.contract import (
    FEATURE_ROWS,
    INPUT_IDS,
    POSITION_IDS,
    ROW_INDICES,
    SEQLENS_K,
    TOTAL_SEQUENCE_LENGTH,
    Contract,
)

Array = npt.NDArray[Any]

CPU, CUDA = "cpu", "cuda"
DEVICES = (CPU, CUDA)

# On a device, passes up to this width keep what they were prepared with. Wider ones are the rest of a prompt.
KEPT_WIDTHS = 16


class Memory(Protocol):
    """A tensor's memory, on which other bindings may be opened. On the CPU it is the array itself."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __len__(self) -> int:
        """The first dimension."""
        ...

    def __getitem__(self, rows: slice) -> Any:
        """The memory of some rows."""
        ...


class Binding(Protocol):
    """One slot's memory, bound once. Not thread-safe: a binding serves one sequence at a time."""

    @property
    def is_async(self) -> bool:
        """Whether a pass may still be running when ``run`` returns. Then ids are known later, and reading waits."""
        ...

    @property
    def host(self) -> Mapping[str, Array]:
        """Tensors that the host writes before a pass, by name, at their largest shape; a pass uses the leading part.

        On the CPU these are all tensors.
        """
        ...

    @property
    def memory(self) -> Mapping[str, Memory]:
        """Every tensor's memory, for other bindings to share."""
        ...

    def upload(self, *names: str) -> None:
        """Copy tensors ``names`` of ``host`` to the device, by default all that it owns, for the next passes."""
        ...

    def upload_items(self, name: str, indices: Sequence[int]) -> None:
        """``upload`` for single items of a one-dimensional tensor."""
        ...

    def write(self, name: str, values: Array, start: int = 0) -> None:
        """Write the rows of any tensor from ``start`` on, for the next passes."""
        ...

    def take(self, name: str, start: int, source: Memory) -> None:
        """Copy ``source`` to the items of tensor ``name`` from ``start`` on, without going through the host."""
        ...

    def run(self, width: int, rows: int) -> None:
        """Run one pass of ``width`` tokens that returns ``rows`` rows. Allocates only for new widths."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """Submit as a whole what this thread enqueues inside, on any binding of the device, up to each ``read``.

        On a GPU work that recurs with the same sizes becomes one CUDA graph.
        """
        ...

    def read(self, *names: str) -> list[Array]:
        """Wait for the last pass; return the parts of tensors that it used. On the CPU, stale data may follow."""
        ...

    def mark(self, number: int) -> None:
        """Record the time at which all earlier work is done; ``number`` is 0 or 1."""
        ...

    def elapsed_ms(self) -> float | None:
        """Time from mark 0 to mark 1; None until the device has reached both."""
        ...

    def close(self) -> None:
        """Free its memory. Closing twice is allowed; running afterwards raises ``RuntimeError``."""
        ...


class Engine(Protocol):
    """A loaded graph with its weights."""

    def open(self, shared: Mapping[str, Any] | None = None) -> Binding:
        """Allocate and bind the buffers of a slot. Tensors named in ``shared`` use that memory instead.

        ``shared`` may name other tensors too. Raises ``ValueError`` for shared memory that does not fit the contract.
        """
        ...


class Backend(Protocol):
    """A library on a device, opened for one bundle.

    Backends of all libraries share the memory of a ``device``: a binding may be opened on another's memory.
    """

    name: str
    device: str

    @property
    def cache_path(self) -> Path | None:
        """The file of the kernels that the library compiled on this machine; None if it compiles none."""
        ...

    def save_cache(self) -> None:
        """Write that file, if there are new kernels."""
        ...

    def load(self, graph: str, contract: Contract, threads: int | None = None) -> Engine:
        """Load the graph at path ``graph`` of the bundle. ``threads`` may differ from the backend's.

        Raises ``BundleError`` or ``BackendError`` if it cannot be loaded or does not match ``contract``.
        """
        ...


class HostBinding:
    """The common part of bindings whose memory is all on the host."""

    is_async = False
    host: Mapping[str, Array]
    _marks: tuple[float, float] = (0.0, 0.0)

    @property
    def memory(self) -> Mapping[str, Array]:
        return self.host

    def upload(self, *names: str) -> None:
        """Nothing to do: passes read what the host writes."""

    def upload_items(self, name: str, indices: Sequence[int]) -> None:
        """Nothing to do: passes read what the host writes."""

    def write(self, name: str, values: Array, start: int = 0) -> None:
        """See ``Binding.write``."""
        self.host[name][start : start + len(values)] = values

    def take(self, name: str, start: int, source: Memory) -> None:
        """See ``Binding.take``."""
        items = np.asarray(source).reshape(-1)
        self.host[name].reshape(-1)[start : start + items.size] = items

    def together(self) -> AbstractContextManager[None]:
        """Nothing to do: a pass is done when ``run`` returns."""
        return nullcontext()

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
    """Write the inputs of a pass over ``ids`` [M] after ``start`` tokens that returns the logits of its last rows.

    A head reads its cache by position.
    """
    width = len(ids)
    host[INPUT_IDS][0, :width] = ids
    host[POSITION_IDS][0, :width] = np.arange(start, start + width)
    host[ROW_INDICES][:rows] = np.arange(width - rows, width)
    if FEATURE_ROWS in host:
        host[FEATURE_ROWS][:width] = host[POSITION_IDS][0, :width]
    if SEQLENS_K in host:  # the standard dialect takes the length from the positions
        host[SEQLENS_K][0], host[TOTAL_SEQUENCE_LENGTH][0] = start + width - 1, start + width


def allocate(shape: tuple[int, ...], dtype: str) -> Array:
    """Zeroed memory aligned to a cache line."""
    count = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.zeros(count + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + count].view(dtype).reshape(shape)


def check_shared(name: str, array: Array, shape: tuple[int, ...], dtype: str) -> None:
    """Raise ``ValueError`` unless ``array`` is contiguous, of this dtype, and at least of ``shape``.

    Only its first dimension may be larger: a sampler for fewer rows reads the first rows of a pass.
    """
    if not isinstance(array, np.ndarray):
        raise ValueError(f"shared buffer {name}: got memory of a device, expected the host's, {dtype}{list(shape)}")
    if not array.flags.c_contiguous or array.dtype != np.dtype(dtype) or not begins_with(array.shape, shape):
        raise ValueError(
            f"shared buffer {name}: got {array.dtype}{list(array.shape)}, expected contiguous {dtype}{list(shape)}"
        )


def begins_with(whole: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether the first rows of a tensor of shape ``whole`` form a tensor of ``shape``."""
    return len(whole) == len(shape) and whole[1:] == shape[1:] and whole[0] >= shape[0]
