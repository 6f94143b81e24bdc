"""Weights in blocks of 8 or 4 bits: every matmul with a stored weight, the tied head and the embedding table too.

MatMul(x, W [K, N])              -> MatMulNBits(x, blocks [N, B, bytes], scales, zero points)
Gemm(x, table [V, H], transB=1)  -> the same, and Gather(table, ids) dequantizes the rows it looks up
Gather(table, ids), not tied     -> the same rows from blocks of their own

``w8a8`` has no blocks: see ``specrt.exporter.passes.integer``. A tied head and tables are as in ``int8``.

Blocks are quantized one weight at a time while the graph is written, by ONNX Runtime's own quantizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnxruntime.capi import _pybind_state as ort_quantizers

from specrt.engines.seam import Array
from specrt.exporter.passes.graph import add_initializer, deferred_initializer, remove_unused, replace_node
from specrt.exporter.passes.integer import integer_matmul


@dataclass(frozen=True)
class Quantization:
    """``bits`` a weight in blocks of ``block_size`` along the summed axis, each with a scale (and a zero point).

    Blocks of 0 are whole columns, and activations are rounded to integers too (``specrt.exporter.passes.integer``).
    """

    bits: int
    block_size: int
    has_zero_points: bool

    @property
    def bytes_per_weight(self) -> float:
        """Scales (and zero points) included."""
        if self.block_size == 0:
            return self.bits / 8
        return self.bits / 8 + (4 + self.has_zero_points * self.bits / 8) / self.block_size


# Blocks of 32: with 128, SmolLM2's passes of 2 and of 9 rows gave other bits, and reproducible text needs equal ones.
QUANTIZATIONS = {
    "int8": Quantization(8, 32, False),
    "w8a8": Quantization(8, 0, False),
    "int4": Quantization(4, 32, True),
}
TABLE = QUANTIZATIONS["int8"]
ACCURACY_LEVEL = 4  # the kernels round activations to int8; pinned, so that no default decides


@dataclass(frozen=True)
class _Blocks:
    """Initializers of a quantized weight [N, K]."""

    data: ir.Value  # [N, B, block bytes] u8
    scales: ir.Value  # [N, B] f32
    zero_points: ir.Value | None  # [N, ceil(B * bits / 8)] u8
    num_rows: int
    num_columns: int


def quantize_weights(model: ir.Model, name: str, vocab_size: int) -> ir.Model:
    """Quantize all matmuls with a stored weight, and the tables they share or that are looked up.

    What has a row for each of ``vocab_size`` ids, head and embedding table, keeps 8 bits: it decides every token.
    """
    tables: dict[str, _Blocks] = {}
    for node in list(model.graph):
        weight = node.inputs[1] if node.op_type in ("MatMul", "Gemm") else None
        if weight is None or weight.const_value is None or weight.shape is None or len(weight.shape) != 2:
            continue
        is_table = node.op_type == "Gemm"
        num_rows = weight.shape[0 if is_table else 1]
        quantization = QUANTIZATIONS[name]
        if quantization.block_size == 0 and not is_table:
            replace_node(model, node, integer_matmul(model, node))
            continue
        if is_table or num_rows == vocab_size:
            quantization = TABLE
        blocks = _blocks(model, weight, quantization, rows_first=is_table)
        if is_table:
            tables[weight.name or ""] = blocks
        replace_node(model, node, [_matmul(node.inputs[0], blocks, quantization)])
    for node in list(model.graph):
        table = node.inputs[0] if node.op_type == "Gather" else None
        if table is None or table.const_value is None or table.shape is None or len(table.shape) != 2:
            continue
        if table.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
            continue
        blocks = tables.get(table.name or "") or _blocks(model, table, TABLE, rows_first=True)
        replace_node(model, node, _lookup(model, node, blocks))
    remove_unused(model)
    return model


def _matmul(rows: ir.Value | None, blocks: _Blocks, quantization: Quantization) -> ir.Node:
    inputs = [rows, blocks.data, blocks.scales, *([blocks.zero_points] if blocks.zero_points else [])]
    attributes = {
        "K": blocks.num_columns,
        "N": blocks.num_rows,
        "bits": quantization.bits,
        "block_size": quantization.block_size,
        "accuracy_level": ACCURACY_LEVEL,
    }
    return ir.node("MatMulNBits", inputs, attributes=attributes, domain="com.microsoft")


def _lookup(model: ir.Model, gather: ir.Node, blocks: _Blocks) -> list[ir.Node]:
    """Rows of a table in ``TABLE`` as fp32: (block - 128) * scale. [1, W] ids -> [1, W, H]"""
    ids, name = gather.inputs[1], gather.name or "lookup"

    def constant(suffix: str, value: Array) -> ir.Value:
        return add_initializer(model, f"{name}.{suffix}", value)

    last = constant("last", np.array([-1], np.int64))
    rows = ir.node("Gather", [blocks.data, ids])  # [1, W, B, block] u8
    scales = ir.node("Gather", [blocks.scales, ids])  # [1, W, B]
    wide = ir.node("Unsqueeze", [scales.outputs[0], last])
    values = ir.node("Cast", [rows.outputs[0]], attributes={"to": ir.DataType.FLOAT})
    centred = ir.node("Sub", [values.outputs[0], constant("zero", np.array(128, np.float32))])
    scaled = ir.node("Mul", [centred.outputs[0], wide.outputs[0]])
    flat = ir.node("Reshape", [scaled.outputs[0], constant("flat", np.array([0, 0, -1], np.int64))])
    ends = [constant("begin", np.array([0], np.int64)), constant("end", np.array([blocks.num_columns], np.int64)), last]
    cut = ir.node("Slice", [flat.outputs[0], *ends])  # the last block may be padded
    return [rows, scales, wide, values, centred, scaled, flat, cut]


def _blocks(model: ir.Model, weight: ir.Value, quantization: Quantization, rows_first: bool) -> _Blocks:
    """Initializers that are filled when they are written. ``rows_first``: the weight lies as [N, K], else as [K, N]."""
    assert weight.const_value is not None
    parts = _Parts(weight.const_value, quantization, rows_first)
    num_rows, num_columns = parts.shape
    bits, size = quantization.bits, quantization.block_size
    num_blocks = -(-num_columns // size)
    name = weight.name

    def deferred(suffix: str, shape: tuple[int, ...], dtype: ir.DataType, make: Callable[[], Array]) -> ir.Value:
        return deferred_initializer(model, f"{name}.{suffix}", shape, dtype, lambda: ir.tensor(make()))

    data = deferred("data", (num_rows, num_blocks, size * bits // 8), ir.DataType.UINT8, parts.data)
    scales = deferred("scales", (num_rows, num_blocks), ir.DataType.FLOAT, lambda: parts.small(0))
    zero_points = None
    if quantization.has_zero_points:
        shape = (num_rows, -(-num_blocks * bits // 8))
        zero_points = deferred("zero_points", shape, ir.DataType.UINT8, lambda: parts.small(1))
    return _Blocks(data, scales, zero_points, num_rows, num_columns)


class _Parts:
    """The blocks of one weight, made when they are asked for. The large part is not kept, the small ones are."""

    def __init__(self, tensor: ir.TensorProtocol, quantization: Quantization, rows_first: bool) -> None:
        self._tensor, self._quantization, self._rows_first = tensor, quantization, rows_first
        first, second = (int(size) for size in tensor.shape)  # type: ignore[arg-type]
        self.shape = (first, second) if rows_first else (second, first)  # [N, K]
        self._small: tuple[Array, Array] | None = None

    def data(self) -> Array:
        array = self._tensor.numpy().astype(np.float32)
        data, *small = quantized(array.T if self._rows_first else array, self._quantization)
        self._small = (small[0], small[1])
        return data

    def small(self, index: int) -> Array:
        """0: scales, 1: zero points."""
        if self._small is None:
            self.data()
        assert self._small is not None
        return self._small[index]


def quantized(weight: Array, quantization: Quantization) -> tuple[Array, Array, Array]:
    """Blocks [N, B, bytes] u8, scales [N, B] f32 and zero points [N, bytes] u8 of ``weight`` [K, N] f32."""
    num_columns, num_rows = weight.shape
    bits, size = quantization.bits, quantization.block_size
    num_blocks = -(-num_columns // size)
    data = np.zeros((num_rows, num_blocks, size * bits // 8), np.uint8)
    scales = np.zeros(num_rows * num_blocks, np.float32)
    zero_points = np.zeros(num_rows * -(-num_blocks * bits // 8), np.uint8)
    quantize = {4: ort_quantizers.quantize_matmul_4bits, 8: ort_quantizers.quantize_matmul_8bits}[bits]
    symmetric = not quantization.has_zero_points
    quantize(data, np.ascontiguousarray(weight), scales, zero_points, size, num_rows, num_columns, symmetric)
    return data, scales.reshape(num_rows, num_blocks), zero_points.reshape(num_rows, -1)
