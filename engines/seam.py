"""The seam between the round and the backends: ``open(slot)`` gives a binding, ``run(width, rows)``, ``close()``.

Weights belong to the engine and are shared; KV, inputs and outputs belong to a binding, one for each open slot. A head
is an engine too: it is opened on the buffers of the model pass that it judges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from specrt.engines.spec import INPUT_IDS, POSITION_IDS, ROW_INDICES, SEQLENS_K, TOTAL_SEQUENCE_LENGTH

Array = npt.NDArray[Any]


class Binding(Protocol):
    """One slot's memory, bound once. Not thread-safe: a binding serves one sequence at a time."""

    @property
    def host(self) -> Mapping[str, Array]:
        """Buffers the host may touch, by tensor name, at their largest shape; a pass uses their leading part."""
        ...

    def run(self, width: int, rows: int) -> None:
        """Run one pass of ``width`` tokens that returns ``rows`` rows. Allocates nothing for widths seen before."""
        ...

    def close(self) -> None:
        """Give the slot back. Closing twice is allowed; running afterwards raises ``RuntimeError``."""
        ...


class Engine(Protocol):
    """A loaded graph with its weights."""

    def open(self, slot: int, shared: Mapping[str, Array] | None = None) -> Binding:
        """Allocate and bind the buffers of ``slot``; tensors named in ``shared`` use that memory instead of their own.

        ``shared`` may name other tensors too. Raises ``ValueError`` for a slot that is open already, or shared memory
        that does not fit the contract.
        """
        ...


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

    It may be longer in its first dimension: a head for fewer rows reads the first rows of a pass.
    """
    fits = len(array.shape) == len(shape) and array.shape[1:] == shape[1:] and array.shape[0] >= shape[0]
    if not array.flags.c_contiguous or array.dtype != np.dtype(dtype) or not fits:
        raise ValueError(
            f"shared buffer {name}: got {array.dtype}{list(array.shape)}, expected contiguous {dtype}{list(shape)}"
        )
