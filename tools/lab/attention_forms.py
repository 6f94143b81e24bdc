"""``python -m specrt.tools.lab.attention_forms``: what an engine copies of the KV cache, by the form of its attention.

Builds with TensorRT-RTX, without a GPU, a model of four layers with 12 query and 2 KV heads of 128, random weights,
rotated queries and keys, in fp16, and lists copies of the full capacity from the layers that the builder reports. Sizes
are in MB of all layers.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from specrt.engines.contract import INPUT_IDS, POSITION_IDS, WIDTH, Contract, TensorSpec, past_name, present_name
from specrt.engines.trt.layers import cache_copies, copied_bytes
from specrt.engines.trt.profiles import DECODE, PREFILL, VERIFY, Profile
from specrt.tools.gpu_check.forms import FORMS, RESHAPED, Form, Heads, Writer
from specrt.tools.lab.engine_layers import engine_layers, profile_width
from specrt.tools.terminal.failure import Tool

LAYERS, HEADS, KV_HEADS, DIM, HIDDEN = 4, 12, 2, 128, 256
PROFILES: dict[str, Profile] = {VERIFY: {WIDTH: (1, 6, 6)}, PREFILL: {WIDTH: (1, 512, 512)}, DECODE: {WIDTH: (1, 1, 1)}}
_INT64, _HALF = 7, 10  # of onnx.TensorProto
_INPUTS = (TensorSpec(INPUT_IDS, "int64", (1, WIDTH)), TensorSpec(POSITION_IDS, "int64", (1, WIDTH)))


def attention_model(form: Form, capacity: int) -> Any:
    """The model in ``form``. Its outputs are the hidden states [1, M, 256] and the updated buffers, all fp16."""
    from onnx import helper

    w, rng, sizes = Writer(), np.random.default_rng(0), Heads(HEADS, KV_HEADS, DIM, capacity, DIM**-0.5)

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
        output = w("Transpose", form(w, query, present[0], present[1], mask, sizes), perm=[0, 2, 1, 3])
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
        onnx.save(attention_model(FORMS[RESHAPED], capacities[0]), path)
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
