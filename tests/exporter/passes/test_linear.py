"""Linear layers on plain rows become what those on batches are, so that packing and quantization see them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from specrt.engines.interface import Array
from specrt.exporter.passes.linear import unify_linears

M, K, N = 5, 40, 72


def gemm(has_bias: bool, **attributes: float) -> ir.Model:
    rng = np.random.default_rng(0)
    shape = (N, K) if attributes.get("transB") else (K, N)
    rows = ir.Value(name="x", shape=ir.Shape((M, K)), type=ir.TensorType(ir.DataType.FLOAT))
    arrays = {"weight": rng.normal(size=shape), "bias": rng.normal(size=N)}
    stored = [
        ir.Value(name=name, shape=ir.Shape(array.shape), const_value=ir.tensor(array.astype(np.float32), name=name))
        for name, array in arrays.items()
    ][: 1 + has_bias]
    node = ir.node("Gemm", [rows, *stored], attributes=attributes)
    node.outputs[0].name = "y"
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape((M, N))
    graph = ir.Graph([rows], node.outputs, nodes=[node], initializers=stored, opset_imports={"": 20})
    return ir.Model(graph, ir_version=10)


def run(model: ir.Model) -> Array:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    rows = np.random.default_rng(1).normal(size=(M, K)).astype(np.float32)
    return np.asarray(session.run(None, {"x": rows})[0])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_transposed", [0, 1])
def test_a_gemm_becomes_a_matmul_and_an_add(has_bias: bool, is_transposed: int) -> None:
    model = gemm(has_bias, transB=is_transposed)
    expected = run(model)
    unify_linears(model)
    assert [node.op_type for node in model.graph] == ["MatMul", "Add"][: 1 + has_bias]
    np.testing.assert_allclose(run(model), expected, atol=1e-5)
    (weight,) = (value for value in model.graph.initializers.values() if len(value.shape or ()) == 2)
    assert weight.shape == ir.Shape((K, N))


def test_what_scales_is_left_alone() -> None:
    model = gemm(True, transB=1, alpha=0.5)
    expected = run(model)
    unify_linears(model)
    assert [node.op_type for node in model.graph] == ["Gemm"]
    assert np.array_equal(run(model), expected)
