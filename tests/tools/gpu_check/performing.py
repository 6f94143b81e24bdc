"""Experiments in the process of a test, and the memory of the simulated GPU."""

from __future__ import annotations

from ctypes import c_uint8
from typing import Any

import numpy as np

from specrt.tools.gpu_check.experiment import Notes, perform
from specrt.tools.gpu_check.kit import Kit


def view(address: int, shape: tuple[int, ...], dtype: str) -> Any:
    """The simulated GPU's memory at ``address`` as an array."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.ctypeslib.as_array((c_uint8 * size).from_address(address)).view(dtype).reshape(shape)


def performed(check: Any, kit: Kit) -> tuple[str, str, dict[str, Any]]:
    notes = Notes()
    return (*perform(check, kit, notes), notes.figures)
