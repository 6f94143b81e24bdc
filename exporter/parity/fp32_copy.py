"""The fp32 copy of a half-precision graph: the same nodes on widened weights, for ONNX Runtime's CPU provider.

The provider has no bf16 kernels, and casts fp16 to fp32 at places of its own choice. The copy computes exactly what
the graph states, without half-precision rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from specrt.exporter.passes.graph import deferred_initializer

_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def widen(model: ir.Model) -> ir.Model:
    """Turn ``model`` into its fp32 copy, in place: every fp16 and bf16 becomes fp32, and nothing else changes."""
    for name, value in list(model.graph.initializers.items()):
        tensor = value.const_value
        if tensor is not None and tensor.dtype in _HALVES:
            del model.graph.initializers[name]
            wide = deferred_initializer(model, name, tuple(tensor.shape.numpy()), ir.DataType.FLOAT, _widened(tensor))
            ir.convenience.replace_all_uses_with(value, wide)
    for value in (*model.graph.inputs, *(output for node in model.graph for output in node.outputs)):
        if value.type is not None and value.type.dtype in _HALVES:
            value.type = ir.TensorType(ir.DataType.FLOAT)
    for node in model.graph:
        if node.op_type == "Cast" and ir.DataType(node.attributes["to"].as_int()) in _HALVES:
            node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT)
        for name, attribute in list(node.attributes.items()):  # the value of a Constant or a ConstantOfShape
            if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in _HALVES:
                node.attributes[name] = ir.AttrTensor(name, _widened(attribute.as_tensor())())
    return model


def _widened(tensor: ir.TensorProtocol) -> Callable[[], ir.TensorProtocol]:
    return lambda: ir.tensor(tensor.numpy().astype(np.float32))
