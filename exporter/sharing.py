"""Weights that two graphs share are stored once: the draft's graph points into the target's weight file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir

_SMALLEST_BYTES = 1024  # smaller tensors stay in the graph's own file


def share_weights(model: ir.Model, other: Path) -> int:
    """Point initializers of ``model`` to equal ones in the weight file of the graph ``other``; return their bytes.

    ``model`` must be saved in the same folder, since ONNX Runtime refuses paths that leave it.
    """
    places = {}
    own = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    kinds = {_kind(tensor) for tensor in own}
    for value in ir.load(other).graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and tensor.nbytes >= _SMALLEST_BYTES and _kind(tensor) in kinds:
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


def write_own_weights(model: ir.Model, graph: Path, written: Callable[[int], None]) -> int:
    """Write the graph, and the weights that are in no file yet to one next to it; return their bytes.

    ``written`` gets the bytes of each tensor.
    """
    values = [
        value
        for value in model.graph.initializers.values()
        if value.const_value is not None
        and not isinstance(value.const_value, ir.ExternalTensor)
        and value.const_value.nbytes >= _SMALLEST_BYTES
    ]
    tensors = [value.const_value for value in values if value.const_value is not None]
    stored = ir.external_data.convert_tensors_to_external(
        tensors, graph.parent, f"{graph.name}.data", callback=lambda tensor, _: written(tensor.nbytes)
    )
    for value, tensor in zip(values, stored, strict=True):
        value.const_value = tensor
    ir.save(model, graph)
    return sum(tensor.nbytes for tensor in tensors)


def _kind(tensor: ir.TensorProtocol) -> tuple[str, tuple[int, ...]]:
    return tensor.dtype.name, tuple(int(size) for size in tensor.shape)  # type: ignore[arg-type]


def _key(tensor: ir.TensorProtocol) -> tuple[str, tuple[int, ...], str]:
    return *_kind(tensor), hashlib.sha256(tensor.tobytes()).hexdigest()
