"""Helpers on an ONNX graph that several passes use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from specrt.engines.experts import Experts
from specrt.engines.interface import Array
from specrt.exporter.tracing.experts import EXPERTS_PER_TOKEN

ATTENTION = "GroupQueryAttention"
EXPERTS = ("MoE", "QMoE")  # inputs: tokens, router logits, then the stored tensors of the experts
FIRST_EXPERTS_INPUT = 2


def attention_nodes(model: ir.Model) -> list[ir.Node]:
    """The attention node of each layer, in the graph's order."""
    return [node for node in model.graph if node.op_type == ATTENTION]


def producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that makes ``value``, if it is of type ``op_type``."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type else None


def add_initializer(model: ir.Model, name: str, array: Array) -> ir.Value:
    """Add ``array`` to the graph's initializers."""
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    model.graph.register_initializer(value)
    return value


def lazy_initializer(model: ir.Model, name: str, parts: list[ir.Value]) -> ir.Value:
    """An initializer that is ``parts`` concatenated on their last axis, computed only when it is written."""
    tensors = [part.const_value for part in parts]
    shapes = [tensor.numpy().shape for tensor in tensors if tensor is not None]
    shape = (*shapes[0][:-1], sum(size[-1] for size in shapes))

    def join() -> ir.TensorProtocol:
        return ir.tensor(np.concatenate([tensor.numpy() for tensor in tensors if tensor is not None], axis=-1))

    dtype = tensors[0].dtype if tensors[0] is not None else ir.DataType.FLOAT
    return deferred_initializer(model, name, shape, dtype, join)


def deferred_initializer(
    model: ir.Model, name: str, shape: tuple[int, ...], dtype: ir.DataType, make: Callable[[], ir.TensorProtocol]
) -> ir.Value:
    """An initializer whose content is computed by ``make`` each time that it is read."""
    tensor = ir.LazyTensor(make, dtype=dtype, shape=ir.Shape(shape), name=name)
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype), const_value=tensor)
    model.graph.register_initializer(value)
    return value


def replace_node(model: ir.Model, node: ir.Node, nodes: list[ir.Node]) -> None:
    """Replace ``node`` by ``nodes``; the output of the last one replaces its output."""
    model.graph.insert_before(node, nodes)
    old, new = node.outputs[0], nodes[-1].outputs[0]
    new.shape, new.type = old.shape, old.type
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    model.graph.remove(node, safe=True)


def inline_functions(model: ir.Model) -> None:
    """Replace calls of model-local functions by their bodies."""
    common.InlinePass()(model)


def remove_unused(model: ir.Model) -> None:
    """Drop nodes and initializers that lead to no output."""
    common.RemoveUnusedNodesPass()(model)


def bytes_per_pass(model: ir.Model) -> int:
    """Bytes of the initializers that a pass of one token reads.

    Tables that are only looked up do not count. Of the experts, only those that a token is routed to count.
    """
    return sum(
        round(value.const_value.nbytes * _share_read(value))
        for value in model.graph.initializers.values()
        if value.const_value is not None
    )


def _share_read(value: ir.Value) -> float:
    """The share of ``value`` that a pass reads. A table that is dequantized only for lookups is not read as a whole."""
    shares = [0.0]
    for node, index in value.uses():
        if node.op_type in ("DequantizeLinear", "Cast"):
            shares.append(_share_read(node.outputs[0]))
        elif node.op_type in EXPERTS and index >= FIRST_EXPERTS_INPUT:
            shares.append(experts_per_token(node) / num_experts(node))
        else:
            shares.append(float(node.op_type != "Gather" or index != 0))
    return max(shares)


def num_experts(node: ir.Node) -> int:
    """The number of experts of a node of ``EXPERTS``."""
    weight = node.inputs[FIRST_EXPERTS_INPUT]
    assert weight is not None and weight.shape is not None
    return int(weight.shape.numpy()[0])


def experts_per_token(node: ir.Node) -> int:
    """The number of experts that a token is routed to in a node of ``EXPERTS``."""
    return int(node.metadata_props[EXPERTS_PER_TOKEN])


def experts_of(model: ir.Model) -> Experts | None:
    """The experts of a graph; None where there are none, where every pass reads all, or where layers differ."""
    nodes = [node for node in model.graph if node.op_type in EXPERTS]
    kinds = {(num_experts(node), experts_per_token(node)) for node in nodes}
    if len(kinds) != 1:
        return None
    values = {value for node in nodes for value in node.inputs[FIRST_EXPERTS_INPUT:] if value is not None}
    values |= {cast.inputs[0] for value in values if (cast := producer(value, "Cast")) and cast.inputs[0] is not None}
    stored = [value.const_value.nbytes for value in values if value.const_value is not None]
    ((count, per_token),) = kinds
    return Experts(len(nodes), count, per_token, sum(stored) // (len(nodes) * count))


def routers(model: ir.Model) -> set[ir.Node]:
    """The matmuls that score experts."""
    found: set[ir.Node] = set()
    for experts in (node for node in model.graph if node.op_type in EXPERTS):
        queue, seen = [experts.inputs[1]], set()
        while queue:
            node = value.producer() if (value := queue.pop()) is not None else None
            if node is None or node in seen or node.op_type == "Shape":
                continue
            seen.add(node)
            if node.op_type in ("MatMul", "Gemm"):
                found.add(node)
            else:
                queue.extend(node.inputs)
    return found


def ancestors(model: ir.Model, wanted: tuple[ir.Value, ...], input_name: str) -> ir.Model:
    """A separate model that computes ``wanted`` from the graph input ``input_name``.

    Raises ``ValueError`` when it needs another input too.
    """
    needed: set[ir.Node] = set()
    queue = list(wanted)
    values: set[ir.Value] = set()
    while queue:
        value = queue.pop()
        if value in values:
            continue
        values.add(value)
        node = value.producer()
        if node is not None and node not in needed:
            needed.add(node)
            queue.extend(filter(None, node.inputs))
        elif value.is_graph_input() and value.name != input_name:
            raise ValueError(f"{wanted[0].name} depends on {value.name}")
    return _copy(model, [node for node in model.graph if node in needed], wanted, input_name)


def _copy(model: ir.Model, nodes: list[ir.Node], wanted: tuple[ir.Value, ...], input_name: str) -> ir.Model:
    mapping: dict[ir.Value, ir.Value] = {}
    graph_input = next(value for value in model.graph.inputs if value.name == input_name)
    initializers = []

    def copy_of(value: ir.Value | None) -> ir.Value | None:
        if value is None or value in mapping:
            return mapping[value] if value is not None else None
        fresh = ir.Value(name=value.name, shape=value.shape, type=value.type, const_value=value.const_value)
        if value.const_value is not None and value.producer() is None:
            initializers.append(fresh)
        mapping[value] = fresh
        return fresh

    start = copy_of(graph_input)
    assert start is not None
    inside = set(nodes)
    for value in (value for node in nodes for value in node.inputs):
        if value is not None and value.producer() not in inside:
            copy_of(value)
    copies = copy_nodes(nodes, mapping)
    outputs = [mapping[value] for value in wanted]
    graph = ir.Graph([start], outputs, nodes=copies, initializers=initializers, opset_imports=model.graph.opset_imports)
    return ir.Model(graph, ir_version=model.ir_version)


def copy_nodes(nodes: Sequence[ir.Node], mapping: dict[ir.Value, ir.Value]) -> list[ir.Node]:
    """Copies of ``nodes``, in their order, that read ``mapping[value]`` for ``value``, or the value itself.

    The outputs of the copies are added to ``mapping``.
    """
    copies = []
    for node in nodes:
        for value in node.outputs:
            mapping[value] = ir.Value(name=value.name, shape=value.shape, type=value.type)
        copies.append(
            ir.Node(
                node.domain,
                node.op_type,
                [mapping.get(value, value) if value is not None else None for value in node.inputs],
                attributes=list(node.attributes.values()),
                outputs=[mapping[value] for value in node.outputs],
                overload=node.overload,
                version=node.version,
                metadata_props=dict(node.metadata_props),
            )
        )
    return copies


def chain_of(value: ir.Value, op_type: str) -> Iterator[ir.Value]:
    """``value``, then the inputs of the chain of ``op_type`` nodes that produces it, the last node's first."""
    current: ir.Value | None = value
    while current is not None:
        yield current
        node = producer(current, op_type)
        current = node.inputs[0] if node is not None else None
