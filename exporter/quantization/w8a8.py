"""Matmuls in 8-bit integers, with a scale per column of the weight and, computed at runtime, per row of activations.

MatMul(x [1, M, K], W [K, N])  ->  round(x / step) @ round(W / scales) * scales * step, step = max |x| / 127 of a row

Both sides are unsigned, with 128 for zero: for unsigned by signed bytes, kernels for AVX2 add two products in 16 bits,
which can overflow. So the sum is exact on every processor, and a row's result depends on no other row. Where the
processor multiplies bytes (VNNI, AMX), passes of several rows cost hardly more than passes of one. Quantizing only the
weights, in blocks (``specrt.exporter.quantization.blocks``), is more accurate.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx_ir as ir

from specrt.engines.interface import Array
from specrt.exporter.passes.graph import add_initializer, deferred_initializer
from specrt.exporter.quantization.parts import LazyParts

_LARGEST = 127
_ZERO = 128  # of unsigned activations and weights
_LEAST_STEP = 1e-30  # of a row of zeros


def integer_matmul(model: ir.Model, matmul: ir.Node) -> list[ir.Node]:
    """The nodes that replace ``matmul``, whose second input is a stored weight [K, N]."""
    rows, weight = matmul.inputs
    assert weight is not None and weight.const_value is not None
    num_inputs, num_outputs = (int(size) for size in weight.const_value.shape)  # type: ignore[arg-type]
    name = weight.name
    columns = LazyParts(partial(_quantized, weight.const_value))
    data = deferred_initializer(
        model, f"{name}.data", (num_inputs, num_outputs), ir.DataType.UINT8, lambda: ir.tensor(columns.data())
    )
    scales = deferred_initializer(
        model, f"{name}.scales", (num_outputs,), ir.DataType.FLOAT, lambda: ir.tensor(columns.scales())
    )

    def constant(suffix: str, value: Array) -> ir.Value:
        return add_initializer(model, f"{name}.{suffix}", value)

    zero = constant("zero", np.array(_ZERO, np.uint8))
    sizes = ir.node("Abs", [rows])
    largest = ir.node("ReduceMax", [sizes.outputs[0], constant("last", np.array([-1], np.int64))])  # [1, M, 1]
    share = ir.node("Mul", [largest.outputs[0], constant("share", np.array(1 / _LARGEST, np.float32))])
    step = ir.node("Max", [share.outputs[0], constant("least", np.array(_LEAST_STEP, np.float32))])
    units = ir.node("Div", [rows, step.outputs[0]])
    whole = ir.node("QuantizeLinear", [units.outputs[0], constant("one", np.array(1, np.float32)), zero])
    sums = ir.node("MatMulInteger", [whole.outputs[0], data, zero, zero])  # [1, M, N] i32
    values = ir.node("Cast", [sums.outputs[0]], attributes={"to": ir.DataType.FLOAT})
    by_column = ir.node("Mul", [values.outputs[0], scales])
    result = ir.node("Mul", [by_column.outputs[0], step.outputs[0]])
    return [sizes, largest, share, step, units, whole, sums, values, by_column, result]


def _quantized(tensor: ir.TensorProtocol) -> tuple[Array, Array]:
    return rounded_columns(tensor.numpy().astype(np.float32))


def rounded_columns(weight: Array) -> tuple[Array, Array]:
    """Integers plus 128 [K, N] u8 and scales [N] f32 of ``weight`` [K, N] f32; a column of zeros has the scale 1."""
    scales = np.abs(weight).max(axis=0) / np.float32(_LARGEST)
    scales[scales == 0] = 1
    return (np.rint(weight / scales) + _ZERO).astype(np.uint8), scales.astype(np.float32)
