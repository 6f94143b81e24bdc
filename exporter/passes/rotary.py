"""Rotary embedding moves into the attention node: cos and sin become two tables, computed once at export.

Before:  q -> Reshape -> [norm] -> Transpose -> q cos + rotate_half(q) sin -> Transpose -> Reshape -> attention
After:   q -> [Reshape -> norm -> Reshape] -> attention(cos_cache, sin_cache, do_rotary=1)

The tables are the traced graph's own cos and sin, evaluated at every position up to the capacity, so any kind of rope
scaling is included. A node that does not match (partial or interleaved rotation) is left unchanged.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnxscript.rewriter.ort_fusions.rotary_embedding import fuse_rotary_embedding

from specrt.engines.contract import POSITION_IDS
from specrt.engines.interface import Array
from specrt.exporter.passes.graph import add_initializer, ancestors, attention_nodes, inline_functions, producer

_FUSED = "RotaryEmbedding"
_HEAD_DIM_MULTIPLE = 16  # onnxruntime refuses do_rotary for other head sizes
_SWAP = (0, 2, 1, 3)


def fold_rotary(model: ir.Model, capacity: int) -> ir.Model:
    """Fold rotation of queries and keys into their GroupQueryAttention node; tables have ``capacity`` positions."""
    fuse_rotary_embedding(model)
    tables: dict[tuple[str, str], tuple[ir.Value, ir.Value] | None] = {}
    for node in attention_nodes(model):
        query, key = _rotation(node.inputs[0]), _rotation(node.inputs[1])
        if query is None or key is None or query.inputs[1:] != key.inputs[1:]:
            continue
        cos, sin = query.inputs[1], query.inputs[2]
        assert cos is not None and sin is not None
        names = (str(cos.name), str(sin.name))
        if names not in tables:
            tables[names] = _tables(model, cos, sin, capacity)
        caches = tables[names]
        if caches is not None:
            _attach(model, node, (query, key), caches)
    inline_functions(model)
    return model


def _rotation(rows: ir.Value | None) -> ir.Node | None:
    """The fused rotation that makes the [1, M, H * D] ``rows`` of an attention node, if nothing else is in between."""
    reshape = producer(rows, "Reshape")
    transpose = producer(reshape.inputs[0], "Transpose") if reshape else None
    if transpose is None or tuple(transpose.attributes["perm"].as_ints()) != _SWAP:
        return None
    return producer(transpose.inputs[0], _FUSED)


def _attach(
    model: ir.Model, node: ir.Node, rotations: tuple[ir.Node, ir.Node], caches: tuple[ir.Value, ir.Value]
) -> None:
    """Bypass the rotation of both inputs and pass the tables to the node."""
    for index, rotation in enumerate(rotations):
        reshape = node.inputs[index].producer()  # type: ignore[union-attr]
        transpose = reshape.inputs[0].producer()  # type: ignore[union-attr]
        transpose.replace_input_with(0, rotation.inputs[0])  # type: ignore[union-attr]
    positions = next(value for value in model.graph.inputs if value.name == POSITION_IDS)
    inputs = [*node.inputs[:7], *caches, positions]
    attributes = [*node.attributes.values(), ir.AttrInt64("do_rotary", 1), ir.AttrInt64("rotary_interleaved", 0)]
    rotated = ir.Node(node.domain, node.op_type, inputs, attributes=attributes, outputs=list(_take_outputs(node)))
    model.graph.insert_before(node, rotated)
    model.graph.remove(node, safe=True)


def _take_outputs(node: ir.Node) -> list[ir.Value]:
    """New values that replace the outputs of ``node`` everywhere, graph outputs included."""
    fresh = []
    for old in node.outputs:
        new = ir.Value(name=old.name, shape=old.shape, type=old.type)
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        fresh.append(new)
    return fresh


def _tables(model: ir.Model, cos: ir.Value, sin: ir.Value, capacity: int) -> tuple[ir.Value, ir.Value] | None:
    """cos and sin at positions 0 .. capacity - 1 as initializers [capacity, D / 2], or None if not possible."""
    values = _evaluate(model, (cos, sin), capacity)
    halves = []
    for value in values:
        table = value.reshape(capacity, -1)  # [capacity, D]
        half = table.shape[1] // 2
        if table.shape[1] % _HEAD_DIM_MULTIPLE or not np.array_equal(table[:, :half], table[:, half:]):
            return None
        halves.append(np.ascontiguousarray(table[:, :half]))
    return (
        add_initializer(model, f"cos_cache.{cos.name}", halves[0]),
        add_initializer(model, f"sin_cache.{sin.name}", halves[1]),
    )


def _evaluate(model: ir.Model, wanted: tuple[ir.Value, ...], capacity: int) -> list[Array]:
    """Run the part of the graph that leads to ``wanted``, which may depend on the positions only."""
    part = ancestors(model, wanted, POSITION_IDS)
    session = ort.InferenceSession(ir.to_proto(part).SerializeToString(), providers=["CPUExecutionProvider"])
    positions = np.arange(capacity, dtype=np.int64)[None]
    return [np.asarray(value) for value in session.run(None, {POSITION_IDS: positions})]
