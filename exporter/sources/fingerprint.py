"""The fingerprint of a model's weights: one SHA-256 over its files' tensors, whatever file each of them is in.

It is taken from names, shapes, stored dtypes and stored values (block formats as float32), so it does not depend on the
dtype or quantization of an export, and ``specrt verify --source`` computes it again without loading a model.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from specrt.engines.progress import SILENT, Progress
from specrt.exporter.sources.checkpoint import Checkpoint


class Fingerprint:
    """Collects tensors, in any order, each once."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add ``tensor``, of any shape and dtype, under the name that its file gives."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = ",".join(map(str, tensor.shape))
        self._lines.append(f"{name} {dtype} [{shape}] {_sha256(tensor)}")

    def hexdigest(self) -> str:
        """The fingerprint of the added tensors, 64 hexadecimal digits."""
        return hashlib.sha256("\n".join(sorted(self._lines)).encode()).hexdigest()


def _sha256(tensor: torch.Tensor) -> str:
    content: Any = raw_bytes(tensor).numpy()
    return hashlib.sha256(content).hexdigest()


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of ``tensor`` in memory as [num_bytes] uint8, without a copy where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def fingerprint_of(checkpoint: Checkpoint, progress: Progress = SILENT) -> str:
    """The fingerprint of ``checkpoint``, one tensor in memory at a time. ``progress`` advances by the bytes of each."""
    found = Fingerprint()
    for name in checkpoint.names():
        tensor = checkpoint.read(name)
        found.add(name, tensor)
        progress.advance(tensor.nbytes)
    return found.hexdigest()
