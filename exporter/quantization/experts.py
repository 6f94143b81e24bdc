"""Experts in blocks of 8 or 4 bits: ``MoE`` becomes ``QMoE``, whose kernel reads the chosen experts' blocks.

MoE(x, logits, gate_up [E, 2 I, H], ., down [E, H, I], .) -> QMoE(x, logits, blocks and scales of each, zero points)

``w8a8`` stores experts as ``int8`` does: the kernel rounds activations to 8 bits in blocks anyway. Blocks have no
offsets, which would be extra columns of a matmul. Experts with rows that neither 32 nor 16 divides are stored in 8 bits
with one scale per row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from specrt.engines.interface import Array
from specrt.exporter.passes.graph import deferred_initializer, remove_unused, replace_node
from specrt.exporter.quantization.blocks import (
    ACCURACY_LEVEL,
    QUANTIZATIONS,
    Quantization,
    quantized,
    quantized_in_4_bits,
)
from specrt.exporter.quantization.parts import LazyParts

_WHOLE_ROWS = Quantization(8, 0, False)
_LARGEST, _ZERO = 127, 128


def quantize_experts(model: ir.Model, name: str) -> ir.Model:
    """Store the experts of every ``MoE`` node as ``QUANTIZATIONS[name]``."""
    for node in list(model.graph):
        if node.op_type == "MoE":
            replace_node(model, node, [_quantized(model, node, name)])
    remove_unused(model)
    return model


def layout_of(name: str, num_inputs: tuple[int, int]) -> Quantization:
    """The layout of experts whose two matmuls sum over ``num_inputs``, which is the same for both."""
    wanted = QUANTIZATIONS["int8" if name == "w8a8" else name]
    size = next((size for size in (wanted.block_size, 16) if all(count % size == 0 for count in num_inputs)), 0)
    return Quantization(wanted.bits, size, wanted.has_zero_points) if size else _WHOLE_ROWS


def _quantized(model: ir.Model, node: ir.Node, name: str) -> ir.Node:
    rows, logits, gate_up, gate_up_bias, down, down_bias = (*node.inputs, None)[:6]
    assert gate_up is not None and down is not None
    layout = layout_of(name, (_shape(gate_up)[2], _shape(down)[2]))
    first, second = _Blocks.of(model, gate_up, layout), _Blocks.of(model, down, layout)
    attributes = {key: attribute.value for key, attribute in node.attributes.items()}
    level = ACCURACY_LEVEL[ir.DataType.FLOAT]
    attributes |= {"expert_weight_bits": layout.bits, "accuracy_level": level, "weights_prepacked": 0}
    if layout.block_size:
        attributes["block_size"] = layout.block_size
    inputs = [rows, logits, first.data, first.scales, gate_up_bias, second.data, second.scales, down_bias]
    if layout.has_zero_points:
        inputs += [None, None, None, first.zero_points, second.zero_points]
    found = ir.node("QMoE", inputs, attributes=attributes, domain="com.microsoft")
    found.metadata_props.update(node.metadata_props)
    return found


def _shape(value: ir.Value) -> tuple[int, int, int]:
    assert value.const_value is not None
    experts, num_rows, num_inputs = (int(size) for size in value.const_value.shape)  # type: ignore[arg-type]
    return experts, num_rows, num_inputs


@dataclass(frozen=True)
class _Blocks:
    """Initializers of a quantized weight [E, N, K]."""

    data: ir.Value  # [E, N, K * bits / 8] u8
    scales: ir.Value  # [E, N, B] f32, or [E, N] of whole rows
    zero_points: ir.Value | None  # [E, N, ceil(B * bits / 8)] u8

    @classmethod
    def of(cls, model: ir.Model, weight: ir.Value, layout: Quantization) -> _Blocks:
        """Initializers computed when they are written."""
        assert weight.const_value is not None
        experts, num_rows, num_inputs = _shape(weight)
        parts = LazyParts(partial(_quantized_experts, weight.const_value, layout))
        blocks = num_inputs // layout.block_size if layout.block_size else 0

        def deferred(suffix: str, last: tuple[int, ...], dtype: ir.DataType, make: Callable[[], Array]) -> ir.Value:
            shape = (experts, num_rows, *last)
            name = f"{weight.name}.{suffix}"
            return deferred_initializer(model, name, shape, dtype, lambda: ir.tensor(make().reshape(shape)))

        data = deferred("data", (num_inputs * layout.bits // 8,), ir.DataType.UINT8, parts.data)
        scales = deferred("scales", (blocks,) if blocks else (), ir.DataType.FLOAT, parts.scales)
        zeros = None
        if layout.has_zero_points:
            last = (-(-blocks * layout.bits // 8),)
            zeros = deferred("zero_points", last, ir.DataType.UINT8, parts.zero_points)
        return cls(data, scales, zeros)


def _quantized_experts(tensor: ir.TensorProtocol, layout: Quantization) -> tuple[Array, ...]:
    """Data, scales and zero points of a weight [E, N, K], in the shapes of ``quantized_rows`` for all experts' rows."""
    parts = [quantized_rows(np.asarray(expert, np.float32), layout) for expert in tensor.numpy()]
    return tuple(np.concatenate(part) for part in zip(*parts, strict=True))


def quantized_rows(weight: Array, layout: Quantization) -> tuple[Array, Array, Array]:
    """Data [N, ...] u8, scales [N, B] (or [N]) f32 and zero points [N, bytes] u8 of ``weight`` [N, K] f32."""
    if layout.bits == 4:
        return quantized_in_4_bits(weight, layout, with_offsets=False)
    if layout.block_size:
        return quantized(weight.T, layout)
    scales = np.abs(weight).max(axis=1) / np.float32(_LARGEST)
    scales[scales == 0] = 1
    data = (np.rint(weight / scales[:, None]) + _ZERO).astype(np.uint8)
    return data, scales.astype(np.float32), np.zeros((len(weight), 0), np.uint8)
