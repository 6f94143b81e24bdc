"""Write the attention of an exported graph in another form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specrt.tools.gpu_check.forms import Form, Heads, Writer


def rewrite_attention(graph: Path, form: Form) -> int:
    """Write every ``Attention`` of the file ``graph`` in ``form``, in place; return how many there were.

    ``graph`` is of the dialect ``standard`` in fp16. The Reshape that export puts before keys and values is left out:
    a form has its own.
    """
    import onnx

    model = onnx.load(str(graph), load_external_data=False)
    makers = {output: node for node in model.graph.node for output in node.output}
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*model.graph.value_info, *model.graph.input, *model.graph.output)
    }
    nodes: list[Any] = []
    num_written = 0
    for node in model.graph.node:
        if node.op_type != "Attention":
            nodes.append(node)
            continue
        query, mask = node.input[0], node.input[3]
        key, value = (_updated(makers, name) for name in node.input[1:3])
        scale = next(attribute.f for attribute in node.attribute if attribute.name == "scale")
        heads = Heads(shapes[query][1], shapes[key][1], shapes[query][3], shapes[key][2], scale)
        writer = Writer(f"attention_{num_written}.")
        form(writer, query, key, value, mask, heads)
        writer.nodes[-1].output[0] = node.output[0]
        nodes.extend(writer.nodes)
        model.graph.initializer.extend(writer.constants)
        num_written += 1
    read = {name for node in nodes for name in node.input} | {output.name for output in model.graph.output}
    del model.graph.node[:]
    model.graph.node.extend(node for node in nodes if read.intersection(node.output))
    onnx.save(model, str(graph))
    return num_written


def _updated(makers: dict[str, Any], name: str) -> str:
    """The updated buffer that ``name`` is, or is a Reshape of."""
    maker = makers[name]
    return str(maker.input[0]) if maker.op_type == "Reshape" else name
