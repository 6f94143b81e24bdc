"""Weights that two graphs share are stored once: the draft's graph points into the target's weight file."""

from __future__ import annotations

import hashlib
from pathlib import Path

import onnx_ir as ir

_SMALLEST_BYTES = 1024  # smaller tensors stay in the graph's own file


def share_weights(model: ir.Model, other: Path) -> int:
    """Point initializers of ``model`` to equal ones in the weight file of the graph ``other``; return their bytes.

    ``model`` must be saved in the same folder, since ONNX Runtime refuses paths that leave it.
    """
    places = {}
    for value in ir.load(other).graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and tensor.nbytes >= _SMALLEST_BYTES:
            places[_key(tensor)] = tensor
            tensor.release()
    shared = 0
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or tensor.nbytes < _SMALLEST_BYTES:
            continue
        found = places.get(_key(tensor))
        if found is not None:
            value.const_value = ir.ExternalTensor(
                found.location, found.offset, found.length, found.dtype, shape=found.shape, name=name,
                base_dir=str(other.parent),
            )  # fmt: skip
            shared += found.nbytes
    return shared


def _key(tensor: ir.TensorProtocol) -> tuple[str, tuple[int, ...], str]:
    shape = tuple(int(size) for size in tensor.shape)  # type: ignore[arg-type]
    return tensor.dtype.name, shape, hashlib.sha256(tensor.tobytes()).hexdigest()
