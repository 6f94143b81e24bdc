"""Matmuls in 8-bit integers: equal to the definition, and no row depends on another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrt.engines.interface import Array
from specrt.engines.manifest import manifest_from_bundle
from specrt.exporter.passes.graph import replace_node
from specrt.exporter.quantization.w8a8 import integer_matmul, rounded_columns
from tests.exports import Exports


def session_of(weight: Array) -> ort.InferenceSession:
    """x [1, M, K] @ weight [K, N], in integers."""
    rows = ir.Value(name="x", shape=ir.Shape([1, "M", len(weight)]), type=ir.TensorType(ir.DataType.FLOAT))
    stored = ir.Value(name="w", const_value=ir.tensor(weight, name="w"), shape=ir.Shape(weight.shape))
    node = ir.node("MatMul", [rows, stored])
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([rows], [node.outputs[0]], nodes=[node], initializers=[stored], opset_imports={"": 20}, name="g")
    model = ir.Model(graph, ir_version=10)
    replace_node(model, node, integer_matmul(model, node))
    model.graph.outputs[0].name = "y"
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])


def by_definition(rows: Array, weight: Array) -> Array:
    integers, scales = rounded_columns(weight)
    step = np.maximum(np.abs(rows).max(axis=-1, keepdims=True) * np.float32(1 / 127), np.float32(1e-30))
    whole = np.rint(rows / step).astype(np.int64)
    product: Array = (whole @ (integers.astype(np.int64) - 128)).astype(np.float32) * scales * step
    return product


@pytest.mark.parametrize("shape", [(1, 1), (32, 7), (300, 20), (1000, 64)])
def test_the_result_is_that_of_the_definition(shape: tuple[int, int]) -> None:
    """At the largest integers everywhere too, where a sum in 16 bits would overflow."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(shape).astype(np.float32)
    session = session_of(weight)
    extreme = np.where(weight[:, 0] > 0, 3, -3).astype(np.float32)
    rows = np.stack([*rng.standard_normal((3, shape[0])), extreme, np.zeros(shape[0])]).astype(np.float32)[None]
    (got,) = session.run(None, {"x": rows})
    np.testing.assert_allclose(got, by_definition(rows, weight), rtol=1e-6, atol=1e-7)


def test_the_largest_sums_are_exact() -> None:
    """All weights and activations at 127: byte products of 16129 that kernels without VNNI must not saturate."""
    weight = np.full((512, 16), 1.0, np.float32)
    (got,) = session_of(weight).run(None, {"x": np.full((1, 2, 512), 1.0, np.float32)})
    np.testing.assert_allclose(got, 512.0, rtol=1e-5)


def test_a_row_is_the_same_in_a_pass_of_any_width() -> None:
    rng = np.random.default_rng(1)
    session = session_of(rng.standard_normal((256, 48)).astype(np.float32))
    rows = rng.standard_normal((1, 9, 256)).astype(np.float32)
    (together,) = session.run(None, {"x": rows})
    for width in range(1, 9):
        (part,) = session.run(None, {"x": rows[:, :width]})
        assert np.array_equal(part, together[:, :width])


@given(st.tuples(st.integers(1, 50), st.integers(1, 9)), st.integers(0, 99), st.floats(-20, 20))
def test_no_weight_is_off_by_more_than_half_a_step(shape: tuple[int, int], seed: int, exponent: float) -> None:
    weight = (np.random.default_rng(seed).standard_normal(shape) * 2.0**exponent).astype(np.float32)
    weight[:, 0] = 0
    raised, scales = rounded_columns(weight)
    integers = raised.astype(np.int64) - 128
    assert np.abs(integers).max() <= 127 and (scales > 0).all()
    assert (np.abs(integers * scales - weight) <= 0.51 * scales + 1e-30).all()


def test_a_bundle_in_w8a8_records_its_error_and_size(exports: Exports, tiny_bundle: Path) -> None:
    plain = manifest_from_bundle(tiny_bundle)
    manifest = manifest_from_bundle(exports.bundle(exports.model(), quantize="w8a8", prefill_chunk=64))
    assert manifest.target.quantization == "w8a8"
    assert 0 < manifest.target.parity.mean_kl < 0.2
    assert manifest.target.weights_bytes < 0.6 * plain.target.weights_bytes
