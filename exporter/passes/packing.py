"""Projections of one input become one matmul. Fewer and larger matmuls use more of the memory bandwidth.

Queries, keys and values:  three MatMul (+ Add) -> one MatMul (+ Add), passed packed to GroupQueryAttention.
Gate and up, and the like: MatMuls of one input -> one MatMul and a Split.
Packed weights are concatenated one at a time when the graph is saved, and never all held in addition to the originals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from specrt.exporter.passes.graph import (
    add_initializer,
    attention_nodes,
    lazy_initializer,
    producer,
    remove_unused,
    routers,
)


@dataclass(frozen=True)
class _Projection:
    """``rows = source @ weight (+ bias)``"""

    source: ir.Value
    weight: ir.Value
    bias: ir.Value | None


def pack_qkv(model: ir.Model) -> ir.Model:
    """Pack the projections of each attention node that reads them directly (rotation inside the node, or none)."""
    for node in attention_nodes(model):
        projections = [_projection(value) for value in node.inputs[:3]]
        if any(p is None for p in projections):
            continue
        found = [p for p in projections if p is not None]
        if len({id(p.source) for p in found}) == 1 and len({p.bias is None for p in found}) == 1:
            packed = _pack(model, found, node)
            node.replace_input_with(0, packed)
            node.replace_input_with(1, None)
            node.replace_input_with(2, None)
    remove_unused(model)
    return model


def pack_shared_inputs(model: ir.Model) -> ir.Model:
    """Join the remaining matmuls that read the same value, except routers, which are never quantized."""
    groups: dict[ir.Value, list[ir.Node]] = {}
    apart = routers(model)
    for node in model.graph:
        weight = node.inputs[1] if node.op_type == "MatMul" and node not in apart else None
        stored = weight.const_value if weight is not None and len(weight.uses()) == 1 else None
        if stored is not None and len(stored.shape) == 2:
            groups.setdefault(node.inputs[0], []).append(node)  # type: ignore[arg-type]
    for source, nodes in groups.items():
        if len(nodes) > 1:
            _join(model, source, nodes)
    remove_unused(model)
    return model


def _join(model: ir.Model, source: ir.Value, nodes: list[ir.Node]) -> None:
    weights = [weight for node in nodes if (weight := node.inputs[1]) is not None]
    widths = [weight.const_value.numpy().shape[-1] for weight in weights if weight.const_value is not None]
    name = f"packed.{weights[0].name}"
    sizes = add_initializer(model, f"{name}.sizes", np.array(widths, np.int64))
    product = ir.node("MatMul", [source, lazy_initializer(model, name, weights)])
    split = ir.node("Split", [product.outputs[0], sizes], attributes={"axis": -1}, num_outputs=len(nodes))
    model.graph.insert_before(nodes[0], [product, split])
    for node, part in zip(nodes, split.outputs, strict=True):
        part.shape, part.type = node.outputs[0].shape, node.outputs[0].type
        ir.convenience.replace_all_uses_with(node.outputs[0], part)
        model.graph.remove(node, safe=True)


def _projection(rows: ir.Value | None) -> _Projection | None:
    bias = None
    add = producer(rows, "Add")
    if add is not None:
        product, bias = add.inputs[0], add.inputs[1]
        if bias is not None and bias.const_value is None:
            product, bias = bias, product
        if bias is None or bias.const_value is None:
            return None
        rows = product
    matmul = producer(rows, "MatMul")
    if matmul is None or rows is None or len(rows.uses()) != 1:
        return None
    source, weight = matmul.inputs
    if source is None or weight is None or weight.const_value is None or len(weight.uses()) != 1:
        return None
    return _Projection(source, weight, bias)


def _pack(model: ir.Model, projections: Sequence[_Projection], before: ir.Node) -> ir.Value:
    name = f"packed.{projections[0].weight.name}"
    weight = lazy_initializer(model, name, [p.weight for p in projections])
    nodes = [ir.node("MatMul", [projections[0].source, weight])]
    biases = [p.bias for p in projections if p.bias is not None]
    if biases:
        nodes.append(ir.node("Add", [nodes[0].outputs[0], lazy_initializer(model, f"{name}.bias", biases)]))
    model.graph.insert_before(before, nodes)
    result: ir.Value = nodes[-1].outputs[0]
    return result
