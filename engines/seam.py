"""The seam between the round and the backends: ``open(slot)`` gives a binding, ``run(width, rows)``, ``close()``.

Weights belong to the engine and are shared; KV, inputs and outputs belong to a binding, one for each open slot. A head
is an engine too: it is opened on the buffers of the model pass that it judges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

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

        Raises ``ValueError`` for a slot that is open already, or shared memory that does not fit the contract.
        """
        ...


def allocate(shape: tuple[int, ...], dtype: str) -> Array:
    """Zeroed memory aligned to a cache line."""
    count = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.zeros(count + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + count].view(dtype).reshape(shape)


def check_shared(name: str, array: Array, shape: tuple[int, ...], dtype: str) -> None:
    """Raise ``ValueError`` unless ``array`` is contiguous and of exactly this dtype and shape."""
    if not array.flags.c_contiguous or array.dtype != np.dtype(dtype) or array.shape != shape:
        raise ValueError(
            f"shared buffer {name}: got {array.dtype}{list(array.shape)}, expected contiguous {dtype}{list(shape)}"
        )
