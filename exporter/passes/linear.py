"""Linear layers on rows without a batch dimension become a MatMul by a weight [K, N] and an Add, as all others are.

Gemm(x [M, K], weight [N, K], bias, transB=1) -> Add(MatMul(x, weight.columns [K, N]), bias)
Gemm(x [M, K], weight [K, N], bias)           -> Add(MatMul(x, weight), bias)

torch's exporter writes a Gemm for two dimensions, which shared experts have, and a MatMul for three. Packing and
quantization only handle the MatMul.
"""

from __future__ import annotations

import onnx_ir as ir

from specrt.exporter.passes.graph import deferred_initializer, remove_unused, replace_node

_PLAIN = {"alpha": 1.0, "beta": 1.0, "transA": 0}


def unify_linears(model: ir.Model) -> ir.Model:
    """Replace each Gemm whose weight is stored and has no other reader. The weight's memory is not copied."""
    for node in list(model.graph):
        weight = node.inputs[1] if node.op_type == "Gemm" else None
        if weight is None or weight.const_value is None or len(weight.uses()) != 1 or not _is_linear(node):
            continue
        is_transposed = "transB" in node.attributes and node.attributes["transB"].as_int() == 1
        product = ir.node("MatMul", [node.inputs[0], _columns(model, weight) if is_transposed else weight])
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        nodes = [product] if bias is None else [product, ir.node("Add", [product.outputs[0], bias])]
        product.outputs[0].shape, product.outputs[0].type = node.outputs[0].shape, node.outputs[0].type
        replace_node(model, node, nodes)
    remove_unused(model)
    return model


def _is_linear(node: ir.Node) -> bool:
    found = {name: attribute.value for name, attribute in node.attributes.items() if name != "transB"}
    return {**_PLAIN, **found} == _PLAIN


def _columns(model: ir.Model, weight: ir.Value) -> ir.Value:
    tensor = weight.const_value
    assert tensor is not None
    num_outputs, num_inputs = (int(size) for size in tensor.shape)  # type: ignore[arg-type]
    return deferred_initializer(
        model,
        f"{weight.name}.columns",
        (num_inputs, num_outputs),
        tensor.dtype,
        lambda: ir.tensor(tensor.numpy().T),
    )
