"""Quantized experts: QMoE answers as experts made of their own blocks would, for each layout of its weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from specrt.engines.interface import Array
from specrt.exporter.quantization.blocks import QUANTIZATIONS, Quantization
from specrt.exporter.quantization.experts import layout_of, quantize_experts, quantized_rows

E, K, ROWS = 6, 2, 7


def mixture(hidden: int, inner: int) -> tuple[ir.Model, Array, Array]:
    """A graph of one MoE node over [M, H] tokens and [M, E] logits; its weights [E, 2 I, H] and [E, H, I]."""
    rng = np.random.default_rng(0)
    gate_up = (rng.normal(size=(E, 2 * inner, hidden)) * 0.1).astype(np.float32)
    down = (rng.normal(size=(E, hidden, inner)) * 0.1).astype(np.float32)
    values = [
        ir.Value(name=name, shape=ir.Shape(("M", size)), type=ir.TensorType(ir.DataType.FLOAT))
        for name, size in (("x", hidden), ("logits", E))
    ]
    weights = [
        ir.Value(name=name, shape=ir.Shape(array.shape), const_value=ir.tensor(array, name=name))
        for name, array in (("gate_up", gate_up), ("down", down))
    ]
    attributes: dict[str, Any] = {
        "k": K,
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "normalize_routing_weights": 1,
    }
    inputs = [*values, weights[0], None, weights[1], None]
    node = ir.node("MoE", inputs, attributes=attributes, domain="com.microsoft")
    node.outputs[0].name = "y"
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(("M", hidden))
    graph = ir.Graph(
        values, node.outputs, nodes=[node], initializers=weights, opset_imports={"": 20, "com.microsoft": 1}
    )
    return ir.Model(graph, ir_version=10), gate_up, down


def run(model: ir.Model, x: Array, logits: Array) -> Array:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x, "logits": logits})[0])


def expected(x: Array, logits: Array, gate_up: Array, down: Array) -> Array:
    """[M, H] by the definition: the K experts of the largest logits, weighted by their softmax."""
    result = np.zeros_like(x)
    for row, scores in enumerate(logits):
        chosen = np.argsort(-scores)[:K]
        weights = np.exp(scores[chosen]) / np.exp(scores[chosen]).sum()
        for weight, expert in zip(weights, chosen, strict=True):
            gate, up = (gate_up[expert] @ x[row]).reshape(-1, 2).T
            result[row] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return result


def dequantized(weights: Array, layout: Quantization) -> Array:
    """[E, N, K] after a round trip through its blocks, by the layout's definition."""
    experts = []
    for weight in weights:
        data, scales, zeros = quantized_rows(weight, layout)
        scales = scales.reshape(len(weight), -1)
        if layout.bits == 4:
            levels = np.stack([data & 15, data >> 4], axis=-1).reshape(*scales.shape, -1)
            zero = np.stack([zeros & 15, zeros >> 4], axis=-1).reshape(len(weight), -1)[:, : scales.shape[1], None]
        else:
            levels, zero = data.reshape(*scales.shape, -1), np.array(128)
        experts.append(((levels.astype(np.float32) - zero) * scales[..., None]).reshape(weight.shape))
    return np.stack(experts)


@pytest.mark.parametrize("name", sorted(QUANTIZATIONS))
@pytest.mark.parametrize(("hidden", "inner", "block"), [(64, 96, 32), (64, 48, 16), (40, 24, 0)])
def test_the_node_answers_as_its_dequantized_experts(name: str, hidden: int, inner: int, block: int) -> None:
    model, gate_up, down = mixture(hidden, inner)
    rng = np.random.default_rng(1)
    x, logits = rng.normal(size=(ROWS, hidden)).astype(np.float32), rng.normal(size=(ROWS, E)).astype(np.float32)
    exact = expected(x, logits, gate_up, down)
    scale = np.abs(exact).max()
    assert np.abs(run(model, x, logits) - exact).max() <= 1e-5 * scale
    layout = layout_of(name, (hidden, inner))
    assert layout.block_size == block and layout.bits == (4 if name == "int4" and block else 8)
    got = run(quantize_experts(model, name), x, logits)
    assert model.graph[0].op_type == "QMoE"
    rounded = expected(x, logits, dequantized(gate_up, layout), dequantized(down, layout))
    error = np.abs(got - rounded).max() / scale
    assert error <= (0.03 if block else 1e-5)  # in blocks, the kernel rounds activations to 8 bits too
    if layout.bits == 4:
        assert np.abs(got - exact).max() / scale > 2 * error
    assert np.abs(np.roll(got, 1, axis=0) - rounded).max() > 0.3 * scale


def test_bytes_are_those_of_the_layout() -> None:
    model, gate_up, down = mixture(64, 96)
    quantize_experts(model, "int4")
    values = model.graph.initializers.values()
    stored = sum(value.const_value.nbytes for value in values if value.const_value is not None)
    num_weights = gate_up.size + down.size
    assert stored / num_weights == pytest.approx(QUANTIZATIONS["int4"].bytes_per_weight(), rel=0.05)
