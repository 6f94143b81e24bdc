"""The weights of ``MoE`` nodes, laid out as the operator reads them, when they are written.

MoE(x, logits, Reshape(Transpose(Reshape(gate_up)))) -> MoE(x, logits, gate_up.laid_out)

The trace states the layout in torch. Left alone, the engine would keep both layouts in memory, or compute one in every
pass.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from specrt.engines.seam import Array
from specrt.exporter.passes.graph import FIRST_EXPERTS_INPUT, deferred_initializer, remove_unused


def lay_out_experts(model: ir.Model) -> ir.Model:
    """Replace each chain of reshapes and transposes between a stored weight and a ``MoE`` node by the result."""
    for node in model.graph:
        if node.op_type != "MoE":
            continue
        for index, value in enumerate(node.inputs[FIRST_EXPERTS_INPUT:], start=FIRST_EXPERTS_INPUT):
            if value is not None and value.const_value is None:
                node.replace_input_with(index, _laid_out(model, value))
    remove_unused(model)
    return model


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
