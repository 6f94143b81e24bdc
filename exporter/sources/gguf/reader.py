"""The gguf package as transformers uses it to load weights, without work that it repeats for each module and field."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import gguf
import numpy as np


class _Reader(gguf.GGUFReader):
    """Its thousands of fields are slices of a plain array: a slice of ``numpy.memmap`` takes several times as long."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, np.asarray(value) if isinstance(value, np.memmap) else value)


@contextmanager
def quick_reader() -> Iterator[None]:
    """Inside the block transformers' loader reads a file with ``_Reader``, and makes the map of names once.

    Without it the loader makes one map for each module of a model: for SmolLM2-135M, a third of the time of loading.
    """
    reader, name_map = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = _Reader, functools.cache(name_map)  # type: ignore[misc]
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, name_map  # type: ignore[misc]
