"""Drop reshapes and transposes that cancel, which tracing a [1, M, H, D] attention leaves behind."""

from __future__ import annotations

import onnx_ir as ir

from specrt.exporter.passes.graph import chain_of, producer, remove_unused

_SWAP = (0, 2, 1, 3)


def drop_round_trips(model: ir.Model) -> ir.Model:
    """Replace a Reshape by the earliest value of its chain with the same shape; cancel pairs of transposes."""
    for node in model.graph:
        if node.op_type == "Transpose":
            _cancel_transposes(node)
    for node in model.graph:
        if node.op_type == "Reshape":
            _shorten(node)
    remove_unused(model)
    return model


def _permutation(node: ir.Node) -> tuple[int, ...]:
    return tuple(node.attributes["perm"].as_ints())


def _cancel_transposes(node: ir.Node) -> None:
    inner = producer(node.inputs[0], "Transpose")
    if inner is not None and _permutation(node) == _permutation(inner) == _SWAP:
        source = inner.inputs[0]
        assert source is not None
        ir.convenience.replace_all_uses_with(node.outputs[0], source)


def _same(a: ir.Value, b: ir.Value) -> bool:
    """Whether both shapes are known and equal, symbols included."""
    if a.shape is None or b.shape is None or len(a.shape) != len(b.shape):
        return False
    return all(x == y and (isinstance(x, int) or x.value is not None) for x, y in zip(a.shape, b.shape, strict=True))


def _shorten(node: ir.Node) -> None:
    output, source = node.outputs[0], node.inputs[0]
    assert source is not None
    chain = list(chain_of(source, "Reshape"))
    for earlier in reversed(chain):
        if _same(earlier, output) and not output.is_graph_output():
            ir.convenience.replace_all_uses_with(output, earlier)
            return
    if len(chain) > 1 and _has_explicit_shape(node):
        node.replace_input_with(0, chain[-1])


def _has_explicit_shape(node: ir.Node) -> bool:
    """Whether the target shape is constant and copies no dimension (a 0) from the input."""
    target = ir.convenience.get_const_tensor(node.inputs[1]) if node.inputs[1] is not None else None
    return target is not None and 0 not in target.numpy()
