"""``python -m specrt.tools.lab.attention_forms``: what an engine copies of the KV cache, by the form of its attention.

Builds with TensorRT-RTX, without a GPU, a model of four layers with 12 query and 2 KV heads of 128, random weights,
rotated queries and keys, in fp16, and lists copies of the full capacity from the layers that the builder reports. Sizes
are in MB of all layers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from specrt.engines.contract import INPUT_IDS, POSITION_IDS, WIDTH, Contract, TensorSpec, past_name, present_name
from specrt.engines.trt.profiles import DECODE, PREFILL, VERIFY, Profile
from specrt.tools.lab.engine_layers import cache_copies, copied_bytes, engine_layers, profile_width
from specrt.tools.terminal.failure import Tool

LAYERS, HEADS, KV_HEADS, DIM, HIDDEN = 4, 12, 2, 128, 256
GROUP, SCALE = HEADS // KV_HEADS, DIM**-0.5
PROFILES: dict[str, Profile] = {VERIFY: {WIDTH: (1, 6, 6)}, PREFILL: {WIDTH: (1, 512, 512)}, DECODE: {WIDTH: (1, 1, 1)}}
_FLOAT, _INT64, _HALF = 1, 7, 10  # of onnx.TensorProto
_INPUTS = (TensorSpec(INPUT_IDS, "int64", (1, WIDTH)), TensorSpec(POSITION_IDS, "int64", (1, WIDTH)))


class Writer:
    """``w("Add", a, b)`` adds a node and returns its output; arrays become initializers."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def __call__(self, op: str, *inputs: Any, named: str | None = None, **attributes: Any) -> str:
        from onnx import helper

        names = [item if isinstance(item, str) else self._constant(item) for item in inputs]
        output = named or f"value_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, names, [output], **attributes))
        return output

    def _constant(self, values: Any) -> str:
        from onnx import numpy_helper

        array = np.asarray(values, np.int64) if isinstance(values, tuple) else np.asarray(values)
        self.constants.append(numpy_helper.from_array(array, f"constant_{len(self.constants)}"))
        return str(self.constants[-1].name)


# (writer, queries [1, H, M, D], keys and values [1, Hkv, C, D], mask [1, 1, M, C], C) -> [1, H, M, D]
Form = Callable[[Writer, str, str, str, str, int], str]


def operator(w: Writer, query: str, key: str, value: str, mask: str, capacity: int) -> str:
    """``Attention`` on the updated buffers."""
    return w("Attention", query, key, value, mask, scale=SCALE)


def reshaped(w: Writer, query: str, key: str, value: str, mask: str, capacity: int) -> str:
    """``Attention`` on the updated buffers, each through a Reshape to its own shape."""
    shape = (1, KV_HEADS, capacity, DIM)
    return operator(w, query, w("Reshape", key, shape), w("Reshape", value, shape), mask, capacity)


def biased(w: Writer, query: str, key: str, value: str, mask: str, capacity: int) -> str:
    """``Attention`` with an additive mask."""
    bias = w("Where", mask, np.float16(0), np.float16(-np.inf))
    return operator(w, query, key, value, bias, capacity)


def scaled_first(w: Writer, query: str, key: str, value: str, mask: str, capacity: int) -> str:
    """``Attention`` on queries that are scaled before."""
    return w("Attention", w("Mul", query, np.float16(SCALE)), key, value, mask, scale=1.0)


def folded_operator(w: Writer, query: str, key: str, value: str, mask: str, capacity: int) -> str:
    """``Attention`` whose rows are the query heads of a group, row by row."""
    rows = w("Transpose", w("Reshape", query, (1, KV_HEADS, GROUP, -1, DIM)), perm=[0, 1, 3, 2, 4])
    rows = w("Reshape", rows, (1, KV_HEADS, -1, DIM))
    seen = w("Expand", w("Unsqueeze", mask, (3,)), (1, 1, 1, GROUP, capacity))
    output = operator(w, rows, key, value, w("Reshape", seen, (1, 1, -1, capacity)), capacity)
    output = w("Transpose", w("Reshape", output, (1, KV_HEADS, -1, GROUP, DIM)), perm=[0, 1, 3, 2, 4])
    return w("Reshape", output, (1, HEADS, -1, DIM))


def repeated(w: Writer, query: str, key: str, value: str, mask: str, capacity: int) -> str:
    """Single operators on keys and values that are repeated to all query heads."""
    wide = (1, KV_HEADS, GROUP, capacity, DIM)
    keys, values = (
        w("Reshape", w("Expand", w("Unsqueeze", t, (2,)), wide), (1, HEADS, capacity, DIM)) for t in (key, value)
    )
    scores = w("MatMul", w("Mul", query, np.float16(SCALE)), w("Transpose", keys, perm=[0, 1, 3, 2]))
    return w("MatMul", _softmax(w, scores, mask), values)


def folded(transposes: str = "keys", **softmax: bool) -> Form:
    """Single operators, the query heads of a group as rows; ``transposes`` keys, or queries and then scores."""

    def form(w: Writer, query: str, key: str, value: str, mask: str, capacity: int) -> str:
        rows = w("Reshape", w("Mul", query, np.float16(SCALE)), (1, KV_HEADS, -1, DIM))
        if transposes == "keys":
            scores = w("MatMul", rows, w("Transpose", key, perm=[0, 1, 3, 2]))
        else:
            scores = w("MatMul", key, w("Transpose", rows, perm=[0, 1, 3, 2]))
            scores = w("Transpose", scores, perm=[0, 1, 3, 2])
        scores = w("Reshape", scores, (1, KV_HEADS, GROUP, -1, capacity))
        probs = _softmax(w, scores, w("Unsqueeze", mask, (1,)), **softmax)
        output = w("MatMul", w("Reshape", probs, (1, KV_HEADS, -1, capacity)), value)
        return w("Reshape", output, (1, HEADS, -1, DIM))

    return form


def reduced(w: Writer, query: str, key: str, value: str, mask: str, capacity: int) -> str:
    """No matmul: products and sums. ONNX Runtime would store all products, 6 GB in a chunk of a 1.5B's layer."""
    rows = w("Cast", w("Reshape", w("Mul", query, np.float16(SCALE)), (1, KV_HEADS, -1, 1, DIM)), to=_FLOAT)
    keys, values = (w("Cast", w("Unsqueeze", t, (2,)), to=_FLOAT) for t in (key, value))
    scores = w("ReduceSum", w("Mul", rows, keys), (4,), keepdims=0)  # [1, Hkv, group * M, C]
    scores = w("Reshape", scores, (1, KV_HEADS, GROUP, -1, capacity))
    probs = w("Softmax", w("Where", w("Unsqueeze", mask, (1,)), scores, np.float32(-np.inf)), axis=-1)
    products = w("Mul", w("Reshape", probs, (1, KV_HEADS, -1, capacity, 1)), values)
    output = w("Cast", w("ReduceSum", products, (3,), keepdims=0), to=_HALF)
    return w("Reshape", output, (1, HEADS, -1, DIM))


def _softmax(w: Writer, scores: str, mask: str, is_bias: bool = False, in_half: bool = False) -> str:
    if is_bias:
        scores = w("Add", scores, w("Where", mask, np.float16(0), np.float16(-60000)))
    else:
        scores = w("Where", mask, scores, np.float16(-np.inf))
    if in_half:
        return w("Softmax", scores, axis=-1)
    return w("Cast", w("Softmax", w("Cast", scores, to=_FLOAT), axis=-1), to=_HALF)


FORMS: dict[str, Form] = {
    "Attention": operator,
    "Attention, cache through a Reshape": reshaped,
    "Attention, mask as bias": biased,
    "Attention, queries scaled first": scaled_first,
    "Attention, groups folded into rows": folded_operator,
    "MatMul, heads repeated": repeated,
    "MatMul, groups folded into rows": folded(),
    "the same, softmax in fp16": folded(in_half=True),
    "the same, mask as bias": folded(is_bias=True),
    "MatMul, groups folded, queries transposed": folded("queries"),
    "products and sums": reduced,
}


def attention_model(form: Form, capacity: int) -> Any:
    """The model in ``form``. Its outputs are the hidden states [1, M, 256] and the updated buffers, all fp16."""
    from onnx import helper

    w, rng = Writer(), np.random.default_rng(0)

    def weights(*shape: int) -> Any:
        return (rng.standard_normal(shape) * HIDDEN**-0.5).astype(np.float16)

    first = w("Reshape", w("Gather", POSITION_IDS, np.int64(0), axis=1), (1,))
    slots = np.arange(capacity, dtype=np.int64).reshape(1, 1, 1, capacity)
    mask = w("LessOrEqual", slots, w("Unsqueeze", POSITION_IDS, (1, 3)))
    angles = [w("Unsqueeze", w("Gather", weights(capacity, DIM), POSITION_IDS), (1,)) for _ in ("cos", "sin")]
    hidden = w("Gather", weights(64, HIDDEN), INPUT_IDS)
    inputs: list[Any] = []
    outputs: list[Any] = []
    for layer in range(LAYERS):
        heads = [_heads(w, hidden, weights(HIDDEN, count * DIM), count) for count in (HEADS, KV_HEADS, KV_HEADS)]
        query, key = (_rotated(w, states, angles[0], angles[1]) for states in heads[:2])
        present = []
        for part, update in (("key", key), ("value", heads[2])):
            past, new = past_name(part, layer), present_name(part, layer)
            present.append(w("TensorScatter", past, update, first, named=new, axis=2))
            for values, name in ((inputs, past), (outputs, new)):
                shape = (1, KV_HEADS, capacity, DIM)
                values.append(helper.make_tensor_value_info(name, _HALF, shape))
        output = w("Transpose", form(w, query, present[0], present[1], mask, capacity), perm=[0, 2, 1, 3])
        merged = w("Reshape", output, (1, -1, HEADS * DIM))
        hidden = w("Add", hidden, w("MatMul", merged, weights(HEADS * DIM, HIDDEN)))
    ids = [helper.make_tensor_value_info(t.name, _INT64, list(t.shape)) for t in _INPUTS]
    last = helper.make_tensor_value_info(w("Identity", hidden), _HALF, [1, WIDTH, HIDDEN])
    graph = helper.make_graph(w.nodes, "attention", [*ids, *inputs], [last, *outputs], w.constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)


def _heads(w: Writer, hidden: str, weights: Any, count: int) -> str:
    return w("Transpose", w("Reshape", w("MatMul", hidden, weights), (1, -1, count, DIM)), perm=[0, 2, 1, 3])


def _rotated(w: Writer, states: str, cos: str, sin: str) -> str:
    half, last = DIM // 2, (3,)
    second = w("Neg", w("Slice", states, (half,), (DIM,), last))
    turned = w("Concat", second, w("Slice", states, (0,), (half,), last), axis=3)
    return w("Add", w("Mul", states, cos), w("Mul", turned, sin))


@click.command(cls=Tool)
@click.option("--capacity", "capacities", type=int, multiple=True, default=(2053, 2112), show_default=True)
def main(capacities: tuple[int, ...]) -> None:
    """A table of forms: layers, copies, MB copied and scratch by profile, and weights by set of profiles."""
    import onnx

    table = Table(title=f"{LAYERS} layers, {HEADS} query and {KV_HEADS} KV heads of {DIM}, fp16: copies of the cache")
    for column in ("form", "capacity", "profile", "layers", "copies", "MB copied", "scratch MB"):
        table.add_column(column)
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        for name, form in FORMS.items():
            for capacity in capacities:
                onnx.save(attention_model(form, capacity), path)
                for row in _rows_of(path, capacity):
                    table.add_row(name, str(capacity), *row)
        console.print(table)
        onnx.save(attention_model(reshaped, capacities[0]), path)
        for names in ((VERIFY,), (DECODE,), (VERIFY, PREFILL), (PREFILL, DECODE), (VERIFY, PREFILL, DECODE)):
            engine = engine_layers(path, Contract(_INPUTS, (), {}), {name: PROFILES[name] for name in names})
            console.print(f"{', '.join(names)}: weights {engine.weights_bytes / 1e6:.2f} MB")


def _rows_of(graph: Path, capacity: int) -> list[tuple[str, ...]]:
    try:
        engine = engine_layers(graph, Contract(_INPUTS, (), {}), PROFILES)
    except RuntimeError as error:
        return [("", "", "", str(error).rpartition(": ")[2][:40], "")]
    rows: list[tuple[str, ...]] = []
    for name, layers in engine.layers.items():
        copies = cache_copies(layers, capacity, DIM)
        copied = copied_bytes(copies, profile_width(PROFILES[name])) / 1e6
        scratch = engine.scratch_bytes[name] / 1e6
        rows.append((name, str(len(layers)), str(len(copies)), f"{copied:.1f}", f"{scratch:.1f}"))
    return rows


if __name__ == "__main__":
    main()
