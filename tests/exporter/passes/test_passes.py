"""Each pass alone keeps the answer of the graph and does what it is for."""

from __future__ import annotations

import collections
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from specrt.engines.contract import model_contract
from specrt.engines.interface import Array
from specrt.exporter.passes import optimize
from specrt.exporter.passes.lm_head import read_tied_table
from specrt.exporter.passes.packing import pack_qkv, pack_shared_inputs
from specrt.exporter.passes.reshapes import drop_round_trips
from specrt.exporter.passes.rotary import fold_rotary
from specrt.exporter.tracing.trace import trace
from specrt.exporter.writing import release_weights
from tests.exporter.tracing.architectures import VOCAB_SIZE, tiny_model
from tests.exporter.tracing.traces import MAX_SEQ_LEN, Traces, W, tiny_spec

CAPACITY = MAX_SEQ_LEN + W - 1
WIDTH = 6


def _run(graph: ir.Model, folder: Path) -> Array:
    """Logits of one pass of ``WIDTH`` rows over 7 cached tokens of made-up KV."""
    ir.save(graph, folder / "model.onnx", external_data="model.onnx.data")
    session = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    feeds: dict[str, Any] = {}
    past = 7
    for node in session.get_inputs():
        dims = {"width": WIDTH, "rows": WIDTH, "capacity": CAPACITY}
        shape = [dims.get(size, size) for size in node.shape]
        feeds[node.name] = rng.standard_normal(shape).astype(np.float32) if "past" in node.name else None
    feeds |= {
        "input_ids": rng.integers(3, VOCAB_SIZE, (1, WIDTH)),
        "position_ids": np.arange(past, past + WIDTH)[None],
        "seqlens_k": np.array([past + WIDTH - 1], np.int32),
        "total_sequence_length": np.array([past + WIDTH], np.int32),
        "row_indices": np.arange(WIDTH),
    }
    logits: Array = session.run(["logits"], feeds)[0]
    return logits


def _counts(graph: ir.Model) -> collections.Counter[str]:
    return collections.Counter(node.op_type for node in graph.graph)


SLOW = ("gemma3", "qwen3", "phi3-partial-rotary", "cohere")
PASSES: dict[str, Callable[[ir.Model], ir.Model]] = {
    "rotary": lambda graph: fold_rotary(graph, CAPACITY),
    "reshapes": drop_round_trips,
    "lm_head": read_tied_table,
    "packing of QKV": pack_qkv,
    "packing of the rest": pack_shared_inputs,
}


@pytest.mark.parametrize(
    "architecture",
    ["llama-tied", "qwen2", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)],
)
def test_each_pass_keeps_the_answer(architecture: str, traces: Traces, tmp_path: Path) -> None:
    graph = traces.raw(architecture)
    expected = _run(graph, tmp_path)
    for name, apply in PASSES.items():
        got = _run(apply(graph), tmp_path)
        error = np.abs(got - expected).max() / np.abs(expected).max()
        assert error < 1e-5, f"{name}: {error:.1e}"


def test_lean_llama_has_no_leftovers(traces: Traces) -> None:
    """2 layers of packed QKV, attention's output, packed gate and up, down; 1 attention, 2 norms, SiLU and gate."""
    counts = _counts(traces.optimized("llama-tied"))
    assert counts["GroupQueryAttention"] == 2
    assert counts["MatMul"] == 2 * 4
    assert counts["Gemm"] == 1
    assert counts["SimplifiedLayerNormalization"] + counts["SkipSimplifiedLayerNormalization"] == 5
    for op_type in ("Cos", "Sin", "Neg", "Concat", "Slice", "Pow", "ReduceMean"):
        assert counts[op_type] == 0, op_type
    assert counts["Transpose"] + counts["Reshape"] <= 4, "only the choice of rows and the head's two are left"


def test_rotary_tables_are_shared_by_all_layers_and_cover_the_capacity(traces: Traces) -> None:
    graph = fold_rotary(traces.raw("llama"), CAPACITY)
    tables = {name: value for name, value in graph.graph.initializers.items() if "_cache." in name}
    assert len(tables) == 2
    assert {tuple(value.const_value.shape) for value in tables.values() if value.const_value} == {(CAPACITY, 8)}
    local_and_global = fold_rotary(traces.raw("gemma3"), CAPACITY)
    assert sum("_cache." in name for name in local_and_global.graph.initializers) == 4


def test_partial_rotary_stays_as_the_model_wrote_it(traces: Traces) -> None:
    graph = fold_rotary(traces.raw("phi3-partial-rotary"), CAPACITY)
    assert not any("_cache." in name for name in graph.graph.initializers)
    assert _counts(graph)["Cos"] == 1


def test_tied_embedding_is_stored_once(traces: Traces) -> None:
    for name, copies in (("llama-tied", 1), ("llama", 2)):
        parameters = sum(parameter.numel() for parameter in tiny_model(name).parameters())
        graph = traces.optimized(name)
        sizes = [v.const_value.size for v in graph.graph.initializers.values() if v.const_value is not None]
        assert sizes.count(VOCAB_SIZE * 64) == copies
        tables = 2 * CAPACITY * 8
        assert parameters <= sum(sizes) <= parameters * 1.01 + tables, "every parameter once, and little else"


def test_graph_inputs_and_outputs_have_the_contracts_symbols(traces: Traces) -> None:
    graph = traces.raw("llama").graph
    contract = model_contract(tiny_spec(tiny_model("llama")))
    for values, tensors in ((graph.inputs, contract.inputs), (graph.outputs, contract.outputs)):
        assert [v.name for v in values] == [t.name for t in tensors]
        for value, tensor in zip(values, tensors, strict=True):
            assert [d if isinstance(d, int) else d.value for d in value.shape or ()] == list(tensor.shape)


def test_weights_are_let_go_when_the_graph_is_written(tmp_path: Path) -> None:
    """Else the torch model stays in memory next to the engine that the written graph is compared on."""
    model = tiny_model("llama-tied")
    spec = tiny_spec(model)
    graph = trace(model, spec)
    optimize(graph, spec)
    ir.save(graph, tmp_path / "model.onnx", external_data="model.onnx.data")
    alive = [weakref.ref(parameter) for parameter in model.parameters()]
    release_weights(model, [graph])
    del model, graph
    gc.collect()
    held = [parameter for reference in alive if (parameter := reference()) is not None and parameter.numel()]
    assert not held
