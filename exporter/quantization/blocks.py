"""Weights in blocks of 8 or 4 bits: every matmul with a stored weight, the tied head and the embedding table.

MatMul(x, W [K, N])              -> MatMulNBits(x, blocks [N, B, bytes], scales, zero points)
                                    in 4 bits, where blocks have offsets, x is followed by the sums of its blocks;
                                    in fp16 by zeros, too, up to a K that CUDA's kernels take
Gemm(x, table [V, H], transB=1)  -> the same, and Gather(table, ids) dequantizes the rows it looks up
Gather(table, ids), not tied     -> the same, from the table's own blocks

``w8a8`` has no blocks: see ``specrt.exporter.quantization.w8a8``. A tied head and tables are as in ``int8``.

Blocks are quantized one weight at a time while the graph is written: 8 bits by ONNX Runtime's own quantizer, 4 bits by
``specrt.exporter.quantization.rounding``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from onnxruntime.capi import _pybind_state as ort_quantizers

from specrt.engines.interface import Array
from specrt.exporter.passes.graph import add_initializer, deferred_initializer, remove_unused, replace_node, routers
from specrt.exporter.quantization.parts import LazyParts
from specrt.exporter.quantization.rounding import round_blocks, share_on_grid
from specrt.exporter.quantization.w8a8 import integer_matmul


@dataclass(frozen=True)
class Quantization:
    """``bits`` a weight in blocks of ``block_size`` along the summed axis, each with a scale (and a zero point).

    With ``block_size`` 0 a block is a whole column, and activations are rounded to integers too
    (``specrt.exporter.quantization.w8a8``).
    """

    bits: int
    block_size: int
    has_zero_points: bool

    def bytes_per_weight(self, scale_bytes: int = 4) -> float:
        """Scales of ``scale_bytes`` each (and zero points) included."""
        if self.block_size == 0:
            return self.bits / 8
        return self.bits / 8 + (scale_bytes + self.has_zero_points * self.bits / 8) / self.block_size

    def in_blocks_of(self, size: int | None) -> Quantization:
        """The same with other blocks; None, and a layout without blocks, change nothing."""
        return replace(self, block_size=size) if size and self.block_size else self


# Blocks of 32: with 128, SmolLM2's passes of 2 and of 9 rows differed in bits, and reproducible text needs equal ones.
QUANTIZATIONS = {
    "int8": Quantization(8, 32, False),
    "w8a8": Quantization(8, 0, False),
    "int4": Quantization(4, 32, True),
}
TABLE = QUANTIZATIONS["int8"]
# Of MatMulNBits: the CPU provider takes 16 to 256, CUDA's kernels for prefills 32, 64 and 128 (matmul_nbits.cc).
BLOCK_SIZES = (32, 64, 128)
WORTH_OFFSETS = 0.5  # a weight gets offsets when at least this share of its blocks is on a 4-bit grid
_OF_OFFSETS = 0.02  # ... and more than this share is on a grid whose offset is not zero
CUDA_COLUMNS = 8  # its kernels for few rows take multiples of this as N and K; for others the weight is widened first
# By the dtype of activations; set explicitly, so that defaults do not matter. 4: the kernels of CPUs round activations
# to int8. CUDA's kernels ignore it and round nothing, so fp16, which is for them, is computed as they do: 0.
ACCURACY_LEVEL = {ir.DataType.FLOAT: 4, ir.DataType.FLOAT16: 0}


@dataclass(frozen=True)
class _Blocks:
    """Initializers of a quantized weight [N, K]. With offsets, ``K`` includes ``num_offsets`` more columns."""

    data: ir.Value  # [N, B, block bytes] u8
    scales: ir.Value  # [N, B] of the weight's dtype
    zero_points: ir.Value | None  # [N, ceil(B * bits / 8)] u8
    num_rows: int
    num_columns: int
    num_offsets: int = 0

    @property
    def dtype(self) -> ir.DataType:
        """Of scales, and so of activations."""
        assert self.scales.dtype is not None
        return self.scales.dtype


def quantize_weights(model: ir.Model, name: str, vocab_size: int, block_size: int | None = None) -> ir.Model:
    """Quantize all matmuls with a stored weight, and embedding tables, tied or not, in blocks of ``block_size``.

    The head and the embedding table, which have a row for each of ``vocab_size`` ids, keep 8 bits in the default
    blocks, since they affect every token. For the same reason routers are not quantized. For experts see
    ``specrt.exporter.quantization.experts``.
    """
    return quantize_tables(model, quantize_matmuls(model, name, vocab_size, block_size))


def quantize_matmuls(model: ir.Model, name: str, vocab_size: int, block_size: int | None = None) -> dict[str, _Blocks]:
    """The matmuls of ``quantize_weights``; returns the blocks of tied tables."""
    tables: dict[str, _Blocks] = {}
    scoring = routers(model)
    for node in list(model.graph):
        weight = node.inputs[1] if node.op_type in ("MatMul", "Gemm") and node not in scoring else None
        if weight is None or weight.const_value is None or weight.shape is None or len(weight.shape) != 2:
            continue
        is_table = node.op_type == "Gemm"
        num_rows = weight.shape[0 if is_table else 1]
        quantization = QUANTIZATIONS[name].in_blocks_of(block_size)
        if quantization.block_size == 0 and not is_table:
            replace_node(model, node, integer_matmul(model, node))
            continue
        if is_table or num_rows == vocab_size:
            quantization = TABLE
        blocks = _blocks(model, weight, quantization, rows_first=is_table)
        if is_table:
            tables[weight.name or ""] = blocks
        replace_node(model, node, _matmul(model, node.inputs[0], blocks, quantization))
    remove_unused(model)
    return tables


def block_size_of(model: ir.Model) -> int | None:
    """The ``block_size`` of ``quantize_weights`` that a graph was made with; None for the default."""
    nodes = [node for node in model.graph if node.op_type == "MatMulNBits"]
    largest = max((node.attributes["block_size"].as_int() for node in nodes), default=TABLE.block_size)
    return largest if largest > TABLE.block_size else None  # the default is the smallest, and the tables' own


def quantize_tables(model: ir.Model, tied: Mapping[str, _Blocks] | None = None) -> ir.Model:
    """The tables of ``quantize_weights``; those in ``tied`` are blocks already."""
    tables = tied or {}
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


def _matmul(model: ir.Model, rows: ir.Value | None, blocks: _Blocks, quantization: Quantization) -> list[ir.Node]:
    nodes = _with_block_sums(model, rows, blocks, quantization.block_size) if blocks.num_offsets else []
    left = nodes[-1].outputs[0] if nodes else rows
    inputs = [left, blocks.data, blocks.scales, *([blocks.zero_points] if blocks.zero_points else [])]
    attributes = {
        "K": blocks.num_columns,
        "N": blocks.num_rows,
        "bits": quantization.bits,
        "block_size": quantization.block_size,
        "accuracy_level": ACCURACY_LEVEL[blocks.dtype],
    }
    return [*nodes, ir.node("MatMulNBits", inputs, attributes=attributes, domain="com.microsoft")]


def _with_block_sums(model: ir.Model, rows: ir.Value | None, blocks: _Blocks, size: int) -> list[ir.Node]:
    """[1, M, K] -> [1, M, K + K / size]: the inputs, then the sum of each block of them. The 1 may be absent."""
    name = blocks.data.name
    rank = len(rows.shape) if rows is not None and rows.shape is not None else 3
    shape = add_initializer(model, f"{name}.by_block", np.array([*(0,) * (rank - 1), -1, size], np.int64))
    last = add_initializer(model, f"{name}.last", np.array([-1], np.int64))
    by_block = ir.node("Reshape", [rows, shape])  # [1, M, B, size]
    sums = ir.node("ReduceSum", [by_block.outputs[0], last], attributes={"keepdims": 0})  # [1, M, B]
    nodes = [by_block, sums]
    if missing := blocks.num_offsets - (blocks.num_columns - blocks.num_offsets) // size:
        ends = add_initializer(model, f"{name}.ends", np.array([0] * (2 * rank - 1) + [missing], np.int64))
        nodes.append(ir.node("Pad", [sums.outputs[0], ends]))
    return [*nodes, ir.node("Concat", [rows, nodes[-1].outputs[0]], attributes={"axis": -1})]


def _lookup(model: ir.Model, gather: ir.Node, blocks: _Blocks) -> list[ir.Node]:
    """Rows of a table in ``TABLE`` as (block - 128) * scale, in the scales' dtype. [1, W] ids -> [1, W, H]"""
    ids, name = gather.inputs[1], gather.name or "lookup"

    def constant(suffix: str, value: Array) -> ir.Value:
        return add_initializer(model, f"{name}.{suffix}", value)

    last = constant("last", np.array([-1], np.int64))
    rows = ir.node("Gather", [blocks.data, ids])  # [1, W, B, block] u8
    scales = ir.node("Gather", [blocks.scales, ids])  # [1, W, B]
    wide = ir.node("Unsqueeze", [scales.outputs[0], last])
    values = ir.node("Cast", [rows.outputs[0]], attributes={"to": blocks.dtype})
    zero = constant("zero", np.array(128, blocks.dtype.numpy()))
    centred = ir.node("Sub", [values.outputs[0], zero])
    scaled = ir.node("Mul", [centred.outputs[0], wide.outputs[0]])
    flat = ir.node("Reshape", [scaled.outputs[0], constant("flat", np.array([0, 0, -1], np.int64))])
    ends = [constant("begin", np.array([0], np.int64)), constant("end", np.array([blocks.num_columns], np.int64)), last]
    cut = ir.node("Slice", [flat.outputs[0], *ends])  # the last block may be padded
    return [rows, scales, wide, values, centred, scaled, flat, cut]


def _blocks(model: ir.Model, weight: ir.Value, quantization: Quantization, rows_first: bool) -> _Blocks:
    """Initializers computed when they are written. ``rows_first``: the weight is stored as [N, K], else as [K, N]."""
    assert weight.const_value is not None and weight.dtype is not None
    dtype, numpy_dtype = weight.dtype, weight.dtype.numpy()
    whole = _Weight(weight.const_value, quantization, rows_first)
    parts = LazyParts(whole.quantized)
    num_rows, num_columns = whole.shape
    bits, size = quantization.bits, quantization.block_size
    num_blocks = -(-num_columns // size)
    name = weight.name

    def deferred(suffix: str, shape: tuple[int, ...], dtype: ir.DataType, make: Callable[[], Array]) -> ir.Value:
        return deferred_initializer(model, f"{name}.{suffix}", shape, dtype, lambda: ir.tensor(make()))

    data = deferred("data", (num_rows, num_blocks, size * bits // 8), ir.DataType.UINT8, parts.data)
    scales = deferred("scales", (num_rows, num_blocks), dtype, lambda: parts.scales().astype(numpy_dtype))
    zero_points = None
    if quantization.has_zero_points:
        shape = (num_rows, -(-num_blocks * bits // 8))
        zero_points = deferred("zero_points", shape, ir.DataType.UINT8, parts.zero_points)
    return _Blocks(data, scales, zero_points, num_rows, num_columns, whole.num_offsets)


class _Weight:
    """A weight, and whether its blocks get columns of offsets.

    ``shape`` is [N, K], the columns of offsets included.
    """

    def __init__(self, tensor: ir.TensorProtocol, quantization: Quantization, rows_first: bool) -> None:
        self._tensor, self._quantization, self._rows_first = tensor, quantization, rows_first
        first, second = (int(size) for size in tensor.shape)  # type: ignore[arg-type]
        rows, columns = (first, second) if rows_first else (second, first)
        weight, size = self._by_row(), quantization.block_size
        on_grid = share_on_grid(weight, size) if quantization.has_zero_points else 0.0
        is_kept = on_grid >= WORTH_OFFSETS
        self.through_zero = is_kept and share_on_grid(weight, size, through_zero=True) >= on_grid - _OF_OFFSETS
        self.has_offsets = is_kept and not self.through_zero
        multiple = CUDA_COLUMNS if tensor.dtype == ir.DataType.FLOAT16 else 1
        self.num_offsets = -(-(columns // size) // multiple) * multiple if self.has_offsets else 0
        self.shape = (rows, columns + self.num_offsets)

    def _by_row(self) -> Array:
        """[N, K]; a view where the memory layout allows it."""
        array: Array = self._tensor.numpy()
        return array if self._rows_first else array.T

    def quantized(self) -> tuple[Array, ...]:
        """Blocks, scales and zero points."""
        weight = self._by_row()
        if self._quantization.bits == 4:
            return quantized_in_4_bits(weight, self._quantization, self.has_offsets, self.through_zero)
        return quantized(np.asarray(weight.T, np.float32), self._quantization)


def quantized(weight: Array, quantization: Quantization) -> tuple[Array, Array, Array]:
    """Blocks [N, B, bytes] u8, scales [N, B] f32 and zero points [N, bytes] u8 of ``weight`` [K, N] f32, in 8 bits."""
    num_columns, num_rows = weight.shape
    size = quantization.block_size
    num_blocks = -(-num_columns // size)
    data = np.zeros((num_rows, num_blocks, size), np.uint8)
    scales = np.zeros(num_rows * num_blocks, np.float32)
    zero_points = np.zeros(num_rows * num_blocks, np.uint8)
    symmetric = not quantization.has_zero_points
    ort_quantizers.quantize_matmul_8bits(
        data, np.ascontiguousarray(weight), scales, zero_points, size, num_rows, num_columns, symmetric
    )
    return data, scales.reshape(num_rows, num_blocks), zero_points.reshape(num_rows, -1)


def quantized_in_4_bits(
    weight: Array, quantization: Quantization, with_offsets: bool, through_zero: bool = False
) -> tuple[Array, Array, Array]:
    """Blocks [N, B, bytes] u8, scales [N, B] f32 and zero points [N, bytes] u8 of ``weight`` [N, K].

    With offsets, blocks of the columns that hold the offsets follow. These are in 4 bits too, since an offset is at
    most half a step. ``through_zero`` is as in ``round_blocks``.
    """
    size = quantization.block_size
    parts = [round_blocks(weight, size, with_offsets, through_zero)]
    if parts[0].offsets is not None:
        parts.append(round_blocks(parts[0].offsets, size, with_offsets=False))
    levels, scales, zero_points = (
        np.concatenate([getattr(part, name) for part in parts], axis=1) for name in ("levels", "scales", "zero_points")
    )
    return packed(levels), np.ascontiguousarray(scales), packed(zero_points)


def packed(levels: Array) -> Array:
    """Two values of 4 bits a byte, the first one low: [..., C] u8 -> [..., ceil(C / 2)] u8."""
    if levels.shape[-1] % 2:
        levels = np.concatenate([levels, np.zeros_like(levels[..., :1])], axis=-1)
    low_first: Array = levels[..., 0::2] | (levels[..., 1::2] << 4)
    return low_first
