"""A GGUF file's metadata is parsed once an export; transformers parses it for config, tokenizer and weights each."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def gguf_parsed_once() -> Iterator[None]:
    """Inside the block, ``gguf.GGUFReader`` and its table of tensor names give what they gave before for the same file.

    A file counts as another one when its size or its time changed. What was parsed is forgotten with the block.
    """
    import gguf

    reader, name_map = gguf.GGUFReader, gguf.get_tensor_name_map

    @functools.cache
    def parsed(path: str, size: int, changed_ns: int, mode: str) -> Any:
        return reader(path, mode)  # type: ignore[arg-type]

    def once(path: Any, mode: str = "r") -> Any:
        stat = os.stat(path)
        return parsed(os.path.realpath(path), stat.st_size, stat.st_mtime_ns, mode)

    vars(gguf).update(GGUFReader=once, get_tensor_name_map=functools.cache(name_map))
    try:
        yield
    finally:
        vars(gguf).update(GGUFReader=reader, get_tensor_name_map=name_map)
