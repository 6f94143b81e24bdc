"""The tensors of a model's files: safetensors, ``pytorch_model.bin`` and GGUF.

Each is read by its own library and never by transformers, so that what transformers loads can be compared with them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors import safe_open

from specrt.engines.errors import SourceError, kind_and_line
from specrt.exporter.sources.gguf.file import read_gguf

# In transformers' order: the first one that exists is used.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_LFS_POINTER = b"version https://git-lfs"


class Checkpoint(Protocol):
    """The tensors of a model's files, under the names that the files give."""

    def names(self) -> Sequence[str]:
        """Every tensor's name, sorted."""

    def read(self, name: str) -> torch.Tensor:
        """One tensor on the CPU, with the shape and dtype that it is stored in. Quantized GGUF blocks give float32."""


class _Files:
    """A ``Checkpoint`` over files, each of which reads its own tensors."""

    def __init__(self, readers: Mapping[str, Callable[[], torch.Tensor]]) -> None:
        self._readers = dict(sorted(readers.items()))

    def names(self) -> Sequence[str]:
        return tuple(self._readers)

    def read(self, name: str) -> torch.Tensor:
        return self._readers[name]()


class GgufCheckpoint(_Files):
    """The ``Checkpoint`` of a GGUF file. ``types`` names the ggml type of each tensor, such as ``Q4_K`` or ``F32``."""

    def __init__(self, path: Path) -> None:
        from gguf import GGMLQuantizationType

        gguf = read_gguf(path)
        kinds = {name: GGMLQuantizationType(info.ggml_type) for name, info in gguf.tensors.items()}
        super().__init__(
            {name: partial(_gguf_tensor, path, kinds[name], t.shape, t.offset) for name, t in gguf.tensors.items()}
        )
        self.architecture = gguf.architecture
        self.types = {name: kind.name for name, kind in kinds.items()}


def open_checkpoint(location: str, options: Mapping[str, Any] | None = None, revision: str | None = None) -> Checkpoint:
    """The tensors of the model at ``location``: a folder, or a hub id whose files are taken from the cache.

    ``options`` are those of ``from_pretrained`` (``gguf_file`` matters), ``revision`` is the resolved hub commit.
    Raises ``SourceError`` for files that are absent, truncated, Git-LFS pointers or contradict their index.
    """
    files = weight_files(location, options, revision)
    if (options or {}).get("gguf_file"):
        with _opening(files[0]):
            return GgufCheckpoint(files[0])
    readers: dict[str, Callable[[], torch.Tensor]] = {}
    for path in files:
        with _opening(path):
            tensors = dict((_safetensors if path.suffix == ".safetensors" else _bin_tensors)(path))
        if twice := sorted(readers.keys() & tensors.keys()):
            raise SourceError(f"{path}: tensor {twice[0]} is in another shard too; download the model again")
        readers |= tensors
    return _Files(readers)


def weight_files(location: str, options: Mapping[str, Any] | None = None, revision: str | None = None) -> list[Path]:
    """The files that hold the weights: one, or the shards that an index names. Raises as ``open_checkpoint`` does."""
    find = finder(location, revision)
    gguf_file = (options or {}).get("gguf_file")
    files = [_found(find, gguf_file)] if gguf_file else _shards(find, location)
    for path in files:
        refuse_lfs_pointer(path)
    return files


def refuse_lfs_pointer(path: Path) -> None:
    """Raise ``SourceError`` when ``path`` is the pointer that Git LFS leaves in place of a file."""
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise SourceError(
                f"{path}: a Git-LFS pointer of {path.stat().st_size} bytes, not the file itself; "
                "run 'git lfs pull' in its folder, or download the model again"
            )


def finder(location: str, revision: str | None) -> Callable[[str], Path | None]:
    """A function from a file name to its path on this machine, or None when the model has no such file."""
    folder = Path(location).expanduser()
    if folder.is_dir():
        return lambda name: folder / name if (folder / name).is_file() else None

    def cached(name: str) -> Path | None:
        try:
            return Path(hf_hub_download(location, name, revision=revision))
        except EntryNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise SourceError(f"{location}: {name} cannot be downloaded ({kind_and_line(error)})") from error

    return cached


def _found(find: Callable[[str], Path | None], name: str) -> Path:
    path = find(name)
    if path is None:
        raise SourceError(f"{name}: no such file; download the whole model")
    return path


def _shards(find: Callable[[str], Path | None], location: str) -> list[Path]:
    path = next(filter(None, map(find, WEIGHT_FILES)), None)
    if path is None:
        raise SourceError(f"{location}: no weights ({', '.join(WEIGHT_FILES)}); download the whole model")
    refuse_lfs_pointer(path)
    if path.suffix != ".json":
        return [path]
    try:
        shards = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise SourceError(f"{path}: not an index of shards ({error!r}); download the model again") from error
    files = [find(shard) for shard in shards]
    if absent := [shard for shard, file in zip(shards, files, strict=True) if file is None]:
        raise SourceError(
            f"{path}: {len(absent)} of its {len(shards)} shards are absent, the first is {absent[0]}; "
            "download the whole model"
        )
    return [file for file in files if file is not None]


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    """Turn any exception of a reader into a ``SourceError`` of one line."""
    try:
        yield
    except SourceError:
        raise
    except Exception as error:  # a damaged file can make its reader raise anything
        raise SourceError(f"{path}: truncated or damaged ({kind_and_line(error)}); download the file again") from error


def _safetensors(path: Path) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    file: Any = safe_open(path, framework="pt")
    for name in file.keys():  # noqa: SIM118, safe_open is no mapping
        yield name, partial(file.get_tensor, name)


def _bin_tensors(path: Path) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            yield name, partial(_itself, tensor)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _is_zip(path: Path) -> bool:
    """Whether ``path`` has torch's zip format, which can be memory-mapped."""
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _gguf_tensor(path: Path, kind: Any, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    """The tensor of ``shape`` at ``offset`` bytes: F32, F16 and BF16 as they are, any block format as float32."""
    from gguf import GGMLQuantizationType, dequantize
    from gguf.quants import quant_shape_to_byte_shape

    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(kind.name)
    kind = GGMLQuantizationType(kind)
    stored = (*shape[:-1], shape[-1] * plain.itemsize) if plain else quant_shape_to_byte_shape(shape, kind)
    raw = np.fromfile(path, np.uint8, math.prod(stored), offset=offset).reshape(stored)
    return torch.from_numpy(raw).view(plain) if plain else torch.from_numpy(dequantize(raw, kind))
