"""Weights as integers for TensorRT, with a DequantizeLinear before the matmul or the lookup that reads them.

MatMul(x, W [K, N])      -> MatMul(x, DequantizeLinear(integers [K, N], scales))
Gather(table [V, H])     -> Gather(DequantizeLinear(integers [V, H], scales [V]))
both, of a tied table    -> integers [H, V], stored once: the head reads them as any matmul does; the lookup gathers
                            columns and multiplies them by their scales

Activations stay fp16 or bf16. TensorRT-RTX 1.7 widens integers inside its matmul in two cases only: 4 bits in blocks,
and 8 bits with one scale per column. The other two cases also build, but widen the whole weight in every pass. A lookup
has its own DequantizeLinear: if it shared a matmul's, the whole table would be widened for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from specrt.engines.interface import Array
from specrt.exporter.passes.graph import add_initializer, deferred_initializer, remove_unused, replace_node
from specrt.exporter.quantization.parts import LazyParts
from specrt.exporter.quantization.rounding import symmetric_scales

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True)
class Layout:
    """Signed integers of ``bits``, with a scale for each block of ``block_size`` along the summed axis.

    With ``block_size`` 0 a block is a whole column. There are no zero points, which TensorRT does not support.
    """

    bits: int
    block_size: int

    def bytes_per_weight(self, scale_bytes: int = 2) -> float:
        """Includes scales of ``scale_bytes`` each, except those of whole columns."""
        return self.bits / 8 + (scale_bytes / self.block_size if self.block_size else 0)


LAYOUTS = {"int8": Layout(8, 0), "int4": Layout(4, 32)}
TABLE = LAYOUTS["int8"]


@dataclass(frozen=True)
class _Integers:
    """Initializers of a quantized weight [K, N]."""

    data: ir.Value  # [K, N] i8 or i4
    scales: ir.Value  # [N] or [B, N], of the activations' dtype
    layout: Layout


def dequantize_weights(model: ir.Model, name: str, vocab_size: int) -> ir.Model:
    """Store the weights of all matmuls, and embedding tables, tied or not, as integers of ``LAYOUTS[name]``.

    The head and the embedding table, which have a row for each of ``vocab_size`` ids, keep 8 bits. So does a weight
    whose rows cannot be divided into blocks of at least 16.
    """
    heads: dict[str, _Integers] = {}
    for node in list(model.graph):
        weight = node.inputs[1] if node.op_type in ("MatMul", "Gemm") else None
        if weight is None or not _is_stored(weight, 2):
            continue
        rows_first = "transB" in node.attributes and node.attributes["transB"].as_int() == 1
        num_inputs, num_outputs = _shape(weight)[::-1] if rows_first else _shape(weight)
        layout = TABLE if rows_first or num_outputs == vocab_size else _layout(LAYOUTS[name], num_inputs)
        integers = _integers(model, _Source(weight, rows_first), layout)
        if rows_first:
            heads[str(weight.name)] = integers
            node.attributes["transB"] = ir.AttrInt64("transB", 0)
        wide = _widened(integers)
        model.graph.insert_before(node, wide)
        node.replace_input_with(1, wide.outputs[0])
    for node in list(model.graph):
        table = node.inputs[0] if node.op_type == "Gather" else None
        if table is not None and _is_stored(table, 2):
            shared = heads.get(str(table.name))
            replace_node(model, node, _lookup_of_head(model, node, shared) if shared else _lookup(model, node, table))
    remove_unused(model)
    return model


def _is_stored(value: ir.Value | None, num_dimensions: int) -> bool:
    tensor = value.const_value if value is not None and value.producer() is None else None
    return tensor is not None and tensor.dtype in _FLOATS and len(tensor.shape) == num_dimensions


def _shape(value: ir.Value) -> tuple[int, int]:
    assert value.const_value is not None
    first, second = (int(size) for size in value.const_value.shape)  # type: ignore[arg-type]
    return first, second


def _layout(layout: Layout, num_inputs: int) -> Layout:
    """``layout``, in blocks of 16 where its own do not divide the rows of a weight."""
    if layout.block_size == 0:
        return layout
    size = next((size for size in (layout.block_size, 16) if num_inputs % size == 0), 0)
    return Layout(layout.bits, size) if size else TABLE


def _widened(integers: _Integers) -> ir.Node:
    size = integers.layout.block_size
    attributes = {"axis": 0, "block_size": size} if size else {"axis": 1}
    return ir.node("DequantizeLinear", [integers.data, integers.scales], attributes=attributes)


def _lookup(model: ir.Model, gather: ir.Node, table: ir.Value) -> list[ir.Node]:
    """Rows of a table that no matmul reads, stored as [V, H]. [1, W] ids -> [1, W, H]"""
    rows = _integers(model, _Source(table, rows_first=True), TABLE, keep_rows=True)
    wide = ir.node("DequantizeLinear", [rows.data, rows.scales], attributes={"axis": 0})
    return [wide, ir.node("Gather", [wide.outputs[0], gather.inputs[1]])]


def _lookup_of_head(model: ir.Model, gather: ir.Node, head: _Integers) -> list[ir.Node]:
    """Columns of a tied head's integers. [1, W] ids -> [1, W, H]"""
    ids = gather.inputs[1]
    assert head.scales.dtype is not None
    one = add_initializer(model, f"{head.data.name}.one", np.array(1, head.scales.dtype.numpy()))
    plain = ir.node("DequantizeLinear", [head.data, one])
    columns = ir.node("Gather", [plain.outputs[0], ids], attributes={"axis": 1})  # [H, 1, W]
    scales = ir.node("Gather", [head.scales, ids])  # [1, W]
    scaled = ir.node("Mul", [columns.outputs[0], scales.outputs[0]])
    return [plain, columns, scales, scaled, ir.node("Transpose", [scaled.outputs[0]], attributes={"perm": [1, 2, 0]})]


@dataclass(frozen=True)
class _Source:
    """A weight as the model stores it: [N, K] where ``rows_first``, else [K, N]."""

    value: ir.Value
    rows_first: bool

    @property
    def shape(self) -> tuple[int, int]:
        """[K, N]"""
        first, second = _shape(self.value)
        return (second, first) if self.rows_first else (first, second)

    def read(self) -> Array:
        """The weight [K, N] f32."""
        assert self.value.const_value is not None
        weight: Array = self.value.const_value.numpy().astype(np.float32)
        return weight.T if self.rows_first else weight


def _integers(model: ir.Model, source: _Source, layout: Layout, keep_rows: bool = False) -> _Integers:
    """Initializers computed when they are written; ``keep_rows`` leaves the integers as [N, K]."""
    dtype = source.value.dtype
    assert dtype is not None
    parts = LazyParts(partial(_quantized, source, layout, dtype.numpy(), keep_rows))
    num_inputs, num_outputs = source.shape
    shape = (num_outputs, num_inputs) if keep_rows else source.shape
    small = (num_inputs // layout.block_size, num_outputs) if layout.block_size else (num_outputs,)

    def deferred(suffix: str, shape: tuple[int, ...], dtype: ir.DataType, make: Callable[[], Array]) -> ir.Value:
        return deferred_initializer(model, f"{source.value.name}.{suffix}", shape, dtype, lambda: ir.tensor(make()))

    data = deferred("data", shape, ir.DataType.INT4 if layout.bits == 4 else ir.DataType.INT8, parts.data)
    return _Integers(data, deferred("scales", small, dtype, parts.scales), layout)


def _quantized(source: _Source, layout: Layout, dtype: np.dtype[Any], keep_rows: bool) -> tuple[Array, Array]:
    integers, scales = rounded(source.read(), layout, dtype)
    integers = np.ascontiguousarray(integers.T) if keep_rows else integers
    return integers.astype(ml_dtypes.int4) if layout.bits == 4 else integers, scales


def rounded(weight: Array, layout: Layout, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Integers [K, N] i8 and scales of ``dtype`` ([N], or [B, N] in blocks) of ``weight`` [K, N] f32.

    The integers are computed from the scales after these are rounded to ``dtype``.
    """
    num_inputs, num_outputs = weight.shape
    size = layout.block_size or num_inputs
    largest = 2 ** (layout.bits - 1) - 1
    blocks = np.ascontiguousarray(weight.reshape(-1, size, num_outputs).transpose(0, 2, 1))
    scales = symmetric_scales(blocks, largest) if layout.block_size else np.abs(blocks).max(axis=-1) / largest
    scales = scales.astype(dtype)
    scales[scales == 0] = 1  # a block of zeros, or of values that round to zero in this dtype
    units = blocks / scales.astype(np.float32)[..., None]  # [B, N, size]
    integers = np.clip(np.rint(units), -largest - 1, largest).astype(np.int8)
    integers = np.ascontiguousarray(integers.transpose(0, 2, 1)).reshape(num_inputs, num_outputs)
    return integers, scales if layout.block_size else scales[0]
