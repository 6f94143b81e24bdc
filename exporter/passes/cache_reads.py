"""Read the updated KV cache through a Reshape, so that TensorRT copies no more of it than the KV heads."""

from __future__ import annotations

import onnx_ir as ir

_KEY, _VALUE = 1, 2  # inputs of Attention


def reshape_cache_reads(model: ir.Model) -> ir.Model:
    """Put a Reshape to the same shape before the keys and values of each ``Attention``. In place.

    The builder copies an updated buffer before it takes another view of it. Attention itself takes two, a head for each
    query head and a flat one: the copy then has all query heads. Of a Reshape, the copy has the KV heads. Passes of one
    token read the buffer without a copy either way. Must follow the passes that drop reshapes.
    """
    graph = model.graph
    for number, node in enumerate([node for node in graph if node.op_type == "Attention"]):
        for part, index in (("key", _KEY), ("value", _VALUE)):
            cache = node.inputs[index]
            assert cache is not None and cache.shape is not None, "KV buffers have a fixed shape"
            name = f"cache_read.{number}.{part}"
            target = ir.Value(name=f"{name}.shape", const_value=ir.tensor(cache.shape.numpy(), name=f"{name}.shape"))
            target.shape, target.type = ir.Shape([len(cache.shape)]), ir.TensorType(ir.DataType.INT64)
            graph.register_initializer(target)
            read = ir.node("Reshape", [cache, target], name=name)
            read.outputs[0].name, read.outputs[0].shape, read.outputs[0].type = name, cache.shape, cache.type
            graph.insert_before(node, read)
            node.replace_input_with(index, read.outputs[0])
    return model
