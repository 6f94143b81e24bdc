"""``MoE`` nodes: weights in the operator's layout, and at least two rows for each expert.

MoE(x, logits, Reshape(Transpose(Reshape(gate_up)))) -> MoE(x, logits, gate_up.laid_out)

The trace converts the layout with torch operators; here this is computed once, when the weights are written. Otherwise
the engine would keep both layouts in memory, or convert one in every pass.

MoE(x [P, H], logits) -> MoE([x, x of experts that have one row], ...)[: P]

Kernels for one row add in another order than those for two or more. Reproducible texts need passes of two or more
tokens to agree to the last bit, and experts do so only where each has at least two rows. A pass of one token is
unchanged.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from specrt.engines.interface import Array
from specrt.exporter.passes.graph import (
    FIRST_EXPERTS_INPUT,
    add_initializer,
    deferred_initializer,
    experts_per_token,
    producer,
    remove_unused,
)


def lay_out_experts(model: ir.Model) -> ir.Model:
    """Replace each chain of reshapes and transposes between a stored weight and a ``MoE`` node by the result."""
    for node in model.graph:
        if node.op_type != "MoE":
            continue
        for index, value in enumerate(node.inputs[FIRST_EXPERTS_INPUT:], start=FIRST_EXPERTS_INPUT):
            cast = producer(value, "Cast")  # from fp16 to fp32: it stays
            reader, place = (node, index) if cast is None else (cast, 0)
            value = reader.inputs[place]
            if value is not None and value.const_value is None:
                reader.replace_input_with(place, _laid_out(model, value))
    remove_unused(model)
    return model


def pair_rows(model: ir.Model) -> ir.Model:
    """Give each expert of a ``MoE`` node at least two rows, in passes of two or more tokens."""
    for node in list(model.graph):
        if node.op_type == "MoE":
            _pair_rows(model, node)
    return model


def _pair_rows(model: ir.Model, node: ir.Node) -> None:
    rows, logits = node.inputs[:2]
    output, name = node.outputs[0], node.name or node.outputs[0].name

    def constant(suffix: str, value: Array) -> ir.Value:
        return add_initializer(model, f"{name}.{suffix}", value)

    def add(op_type: str, *inputs: ir.Value | None, **attributes: int) -> ir.Value:
        made = ir.node(op_type, list(inputs), attributes=attributes)
        made.outputs[0].name = f"{name}.{len(before)}"
        before.append(made)
        return made.outputs[0]

    before: list[ir.Node] = []
    first, last = constant("first", np.array([0], np.int64)), constant("last", np.array([1], np.int64))
    chosen = add("Cast", add("Cast", logits, to=ir.DataType.BOOL), to=ir.DataType.FLOAT)  # 1 where it is not chosen
    chosen = add("Sub", constant("one", np.array(1, np.float32)), chosen)  # [P, E]
    counts = add("ReduceSum", chosen, first, keepdims=1)  # [1, E]: rows of each expert
    own = add("ReduceSum", add("Mul", chosen, counts), last, keepdims=0)  # [P]: rows of a row's expert
    is_alone = add("Less", own, constant("two", np.array(1.5, np.float32)))
    size = add("Shape", rows, start=0, end=1)
    per_token = constant("per_token", np.array([experts_per_token(node)], np.int64))
    is_alone = add("And", is_alone, add("Greater", size, per_token))
    node.replace_input_with(0, add("Concat", rows, add("Compress", rows, is_alone, axis=0), axis=0))
    node.replace_input_with(1, add("Concat", logits, add("Compress", logits, is_alone, axis=0), axis=0))
    model.graph.insert_before(node, before)
    cut = ir.node("Slice", [output, first, size, first])
    cut.outputs[0].shape, cut.outputs[0].type = output.shape, output.type
    ir.convenience.replace_all_uses_with(output, cut.outputs[0])
    cut.replace_input_with(0, output)
    output.shape = None
    model.graph.insert_after(node, cut)


def _laid_out(model: ir.Model, value: ir.Value) -> ir.Value:
    steps: list[Callable[[Array], Array]] = []
    current = value
    while current.const_value is None:
        node = current.producer()
        if node is None or node.inputs[0] is None:
            raise ValueError(f"{value.name}: the experts' weights are computed in the graph")
        steps.append(_step(node))
        current = node.inputs[0]
    tensor = current.const_value

    def make() -> ir.TensorProtocol:
        array: Array = tensor.numpy()
        for step in reversed(steps):
            array = step(array)
        return ir.tensor(np.ascontiguousarray(array))

    assert value.shape is not None and value.shape.is_static()
    shape = tuple(int(size) for size in value.shape.numpy())
    return deferred_initializer(model, f"{current.name}.laid_out", shape, tensor.dtype, make)


def _step(node: ir.Node) -> Callable[[Array], Array]:
    if node.op_type == "Transpose":
        permutation = tuple(node.attributes["perm"].as_ints())
        return lambda array: array.transpose(permutation)
    target = ir.convenience.get_const_tensor(node.inputs[1]) if node.op_type == "Reshape" and node.inputs[1] else None
    if target is None:
        raise ValueError(f"{node.name}: {node.op_type} between an expert's weight and its operator")
    shape = tuple(int(size) for size in target.numpy())
    return lambda array: array.reshape(shape)
