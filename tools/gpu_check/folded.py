"""A graph's ``Attention`` written as matmuls whose rows are the query heads of a group: KV heads are not repeated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


def fold_attention(graph: Path) -> int:
    """Rewrite every ``Attention`` node of the file ``graph`` in place; return how many there were."""
    import onnx

    model = onnx.load(str(graph), load_external_data=False)
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*model.graph.value_info, *model.graph.input, *model.graph.output)
    }
    nodes: list[Any] = []
    num_folded = 0
    for node in model.graph.node:
        if node.op_type == "Attention":
            nodes.extend(_folded(onnx, model.graph, node, shapes, f"folded.{num_folded}"))
            num_folded += 1
        else:
            nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, str(graph))
    return num_folded


def _folded(onnx: Any, graph: Any, node: Any, shapes: dict[str, list[int]], prefix: str) -> Iterator[Any]:
    """q [1, H, M, D], keys and values [1, G, C, D], mask [1, 1, M, C] -> [1, H, M, D]"""
    query, key, value, mask = node.input
    heads, dim, groups, capacity = shapes[query][1], shapes[query][3], shapes[key][1], shapes[key][2]
    scale = next(attribute.f for attribute in node.attribute if attribute.name == "scale")

    def constant(name: str, array: Any) -> str:
        graph.initializer.append(onnx.numpy_helper.from_array(array, f"{prefix}.{name}"))
        return f"{prefix}.{name}"

    def shape(name: str, *sizes: int) -> str:
        return constant(name, np.array(sizes, np.int64))

    def make(op_type: str, inputs: list[str], output: str, **attributes: Any) -> Any:
        name = output if output == node.output[0] else f"{prefix}.{output}"
        return onnx.helper.make_node(op_type, inputs, [name], name=name, **attributes)

    at = f"{prefix}.".__add__
    yield make("Mul", [query, constant("scale", np.float16(scale))], "scaled")
    yield make("Reshape", [at("scaled"), shape("rows", 1, groups, -1, dim)], "query")
    yield make("Transpose", [key], "keys", perm=[0, 1, 3, 2])
    yield make("MatMul", [at("query"), at("keys")], "flat_scores")
    yield make("Reshape", [at("flat_scores"), shape("by_head", 1, groups, heads // groups, -1, capacity)], "scores")
    yield make("Where", [mask, at("scores"), constant("masked", np.float16(-60000))], "visible")
    yield make("Cast", [at("visible")], "wide", to=onnx.TensorProto.FLOAT)
    yield make("Softmax", [at("wide")], "wide_probs", axis=-1)
    yield make("Cast", [at("wide_probs")], "probs", to=onnx.TensorProto.FLOAT16)
    yield make("Reshape", [at("probs"), shape("by_row", 1, groups, -1, capacity)], "flat_probs")
    yield make("MatMul", [at("flat_probs"), value], "flat")
    yield make("Reshape", [at("flat"), shape("out", 1, heads, -1, dim)], node.output[0])
