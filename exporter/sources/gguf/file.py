"""A GGUF file's metadata and table of tensors, read without its tokens, its merges and its tensors' data.

The layout is that of the GGUF specification, versions 2 and 3, little-endian. Any damage raises ``SourceError``.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from specrt.engines.errors import SourceError
from specrt.engines.interface import Array

SUFFIX = ".gguf"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LFS_MARK = b"version https://git-lfs"
_FLOATS: dict[int, np.dtype[Any]] = {0: np.dtype("<f4"), 1: np.dtype("<f2")}  # F32, F16
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
_DOWNLOAD = "download the file again"


@dataclass(frozen=True)
class Strings:
    """An array of strings that was skipped, of which only the length is known."""

    count: int


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the file: shape in torch's order, type as ggml numbers it, offset in bytes from the file's start."""

    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True)
class GgufFile:
    """The header of a file. Numbers and strings are Python's; arrays of numbers are lists, of strings ``Strings``."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def of_architecture(self) -> dict[str, Any]:
        """The metadata of the architecture's namespace, without its prefix."""
        prefix = f"{self.architecture}."
        return {key.removeprefix(prefix): value for key, value in self.metadata.items() if key.startswith(prefix)}

    def floats(self, name: str) -> Array:
        """The values [N] f32 of a tensor of floats. Raises ``SourceError`` for one in quantized blocks."""
        info = self.tensors[name]
        dtype = _FLOATS.get(info.ggml_type)
        if dtype is None:
            raise SourceError(f"{self.path}: {name} has ggml type {info.ggml_type}, expected F32 or F16; {_DOWNLOAD}")
        count = int(np.prod(info.shape))
        values: Array = np.fromfile(self.path, np.dtype(dtype), count, offset=info.offset).astype(np.float32)
        return values


def is_gguf_name(path: Path) -> bool:
    """Whether the name ends in .gguf, in upper or lower case."""
    return path.suffix.lower() == SUFFIX


def is_lfs_pointer(path: Path) -> bool:
    """Whether Git LFS has put a pointer in place of the file."""
    with path.open("rb") as file:
        return file.read(len(_LFS_MARK)) == _LFS_MARK


def read_gguf(path: Path) -> GgufFile:
    """Read ``path``; cached until the file changes. Raises ``SourceError`` that states what is damaged."""
    try:
        status = path.stat()
        return _read(path, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror or error})") from error


@lru_cache(maxsize=8)
def _read(path: Path, _modified_ns: int, num_bytes: int) -> GgufFile:
    if is_lfs_pointer(path):
        raise SourceError(f"{path}: a Git-LFS pointer, not the file itself; run 'git lfs pull' or {_DOWNLOAD}")
    if num_bytes < 24:
        raise SourceError(f"{path}: {num_bytes} bytes, too short for a GGUF file; {_DOWNLOAD}")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found = _parsed(path, data)
    _refuse_parts(found)
    _check_sizes(found, num_bytes)
    return found


def _parsed(path: Path, data: mmap.mmap) -> GgufFile:
    if data[:4] != b"GGUF":
        raise SourceError(f"{path}: not a GGUF file (it begins with {data[:4]!r}, expected b'GGUF'); {_DOWNLOAD}")
    version, num_tensors, num_keys = struct.unpack_from("<IQQ", data, 4)
    if version not in _VERSIONS:
        if version & 0xFFFF == 0:
            raise SourceError(f"{path}: a big-endian GGUF file; expected little-endian, convert the model again")
        raise SourceError(f"{path}: GGUF version {version}, expected 2 or 3; convert the model again")
    cursor = _Cursor(data, 24)
    try:
        metadata = _metadata(cursor, num_keys)
        tensors = _tensors(cursor, num_tensors, metadata)
    except (struct.error, UnicodeDecodeError, _DamageError, OverflowError, MemoryError) as error:
        raise SourceError(f"{path}: damaged or cut off in its header ({error}); {_DOWNLOAD}") from error
    if not isinstance(metadata.get("general.architecture"), str):
        raise SourceError(f"{path}: general.architecture is missing, so it is no model; give a GGUF file of a model")
    return GgufFile(path, metadata, tensors)


class _DamageError(Exception):
    """The header is inconsistent."""


class _Cursor:
    """A position in the file's bytes that advances with each value read."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self.data, self.position = data, position

    def unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self.data, self.position)
        self.position += struct.calcsize(f"<{form}")
        return values

    def string(self) -> str:
        (length,) = self.unpack("Q")
        return self._take(length).decode("utf-8")

    def skip_string(self) -> None:
        (length,) = self.unpack("Q")
        self.position += length
        if self.position > len(self.data):
            raise _DamageError("a string ends after the file")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])[0]
        if kind != _ARRAY:
            raise _DamageError(f"value type {kind}")
        element, count = self.unpack("IQ")
        if element == _STRING:
            for _ in range(count):
                self.skip_string()
            return Strings(count)
        if element not in _SCALARS:
            raise _DamageError(f"an array of type {element}")
        if count * struct.calcsize(_SCALARS[element]) > len(self.data) - self.position:
            raise _DamageError("an array ends after the file")
        return list(self.unpack(f"{count}{_SCALARS[element]}"))

    def _take(self, length: int) -> bytes:
        if length > len(self.data) - self.position:
            raise _DamageError("a string ends after the file")
        self.position += length
        return self.data[self.position - length : self.position]


def _metadata(cursor: _Cursor, num_keys: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in found:
            raise _DamageError(f"{key} twice")
        found[key] = cursor.value(cursor.unpack("I")[0])
    return found


def _tensors(cursor: _Cursor, num_tensors: int, metadata: dict[str, Any]) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    for _ in range(num_tensors):
        name = cursor.string()
        (num_dims,) = cursor.unpack("I")
        if name in found or num_dims > 8:
            raise _DamageError(f"tensor {name} twice" if name in found else f"tensor {name} of {num_dims} dimensions")
        shape = tuple(reversed(cursor.unpack(f"{num_dims}Q")))
        found[name] = TensorInfo(shape, *cursor.unpack("IQ"))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise _DamageError(f"general.alignment {alignment}")
    start = -(-cursor.position // alignment) * alignment
    return {name: TensorInfo(info.shape, info.ggml_type, start + info.offset) for name, info in found.items()}


def _refuse_parts(found: GgufFile) -> None:
    """Refuse a part of a split model: it holds only some of the tensors, and the metadata is in the first part."""
    count = found.metadata.get("split.count", 0)
    if not isinstance(count, int) or count <= 1:
        return
    number = found.metadata.get("split.no", 0)
    first = _PART.sub(f"-00001-of-{count:05}", found.path.stem) + found.path.suffix
    raise SourceError(
        f"{found.path}: part {number + 1} of {count} of a split model, expected a whole one; join the parts with "
        f"'llama-gguf-split --merge {first} whole.gguf' and export whole.gguf"
    )


def _check_sizes(found: GgufFile, num_bytes: int) -> None:
    block = _block_sizes()
    for name, info in found.tensors.items():
        sizes = block(info.ggml_type)
        if sizes is None:
            raise SourceError(f"{found.path}: {name} has ggml type {info.ggml_type}, which is unknown; quantize again")
        end = info.offset + int(np.prod(info.shape, dtype=object)) // sizes[0] * sizes[1]
        if end > num_bytes:
            raise SourceError(f"{found.path}: {name} ends at byte {end}, the file at {num_bytes}; {_DOWNLOAD}")


def _block_sizes() -> Callable[[int], tuple[int, int] | None]:
    """(values, bytes) of a block of a ggml type, None for one that is unknown."""
    from gguf import GGML_QUANT_SIZES

    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    return sizes.get
