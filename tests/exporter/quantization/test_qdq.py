"""Weights as integers for TensorRT: the graph equals the model with rounded weights, in passes of any width."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specrt.engines.contract import LOGITS, STANDARD_DIALECT, model_contract
from specrt.engines.errors import UsageError
from specrt.engines.interface import Array
from specrt.exporter.options import ExportOptions
from specrt.exporter.parity.fp32_copy import widen
from specrt.exporter.parity.precision import cast_weights
from specrt.exporter.passes.graph import bytes_per_pass
from specrt.exporter.quantization.qdq import LAYOUTS, TABLE, Layout, dequantize_weights, rounded
from tests.exporter.passes.passes_on_ort import Passes
from tests.exporter.tracing.architectures import VOCAB_SIZE, tiny_model
from tests.exporter.tracing.test_standard import HALF_TOLERANCE, PAST, TOLERANCE, nodes_of
from tests.exporter.tracing.traces import Traces, W, rounded_model, tiny_spec

NAMES = sorted(LAYOUTS)
ARCHITECTURES = ["llama", "llama-tied", "gpt2"]
# Each with something of its own: tables, packed weights, biases, scaled logits.
OTHERS = ["phi3-longrope"]
SLOW = ["gemma2-head-of-12", "qwen2", "gemma3", "phi3", "cohere"]


def layout_of(name: str, shape: tuple[int, ...]) -> Layout:
    """The layout of a weight [N, K] of a tiny model: its heads and tables keep 8 bits, 48 inputs take blocks of 16."""
    if shape[0] == VOCAB_SIZE or LAYOUTS[name].block_size == 0:
        return TABLE
    return LAYOUTS[name] if shape[1] % 32 == 0 else Layout(4, 16)


def dequantized(weight: Array, layout: Layout, dtype: np.dtype[Any]) -> Array:
    """``weight`` [K, N] f32 after a round trip, by the definition of DequantizeLinear."""
    integers, scales = rounded(weight, layout, dtype)
    assert scales.dtype == dtype
    wide = scales.astype(np.float32)
    by_row = np.repeat(wide, layout.block_size, axis=0) if layout.block_size else wide[None]
    result: Array = integers.astype(np.float32) * by_row
    inside = np.abs(integers) < 2 ** (layout.bits - 1) - 1
    assert (np.abs(result - weight) <= 0.501 * np.abs(by_row))[inside].all(), "to the nearest integer"
    return result


@given(
    name=st.sampled_from(NAMES),
    dtype=st.sampled_from([np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]),
    num_blocks=st.integers(1, 5),
    num_columns=st.integers(1, 20),
    seed=st.integers(0, 1000),
)
def test_weights_are_off_by_about_half_a_step(
    name: str,
    dtype: np.dtype[Any],
    num_blocks: int,
    num_columns: int,
    seed: int,
) -> None:
    layout = LAYOUTS[name]
    size = layout.block_size or 32
    weight = np.random.default_rng(seed).standard_normal((num_blocks * size, num_columns)).astype(np.float32)
    weight[:size, 0] = 0
    error = np.abs(dequantized(weight, layout, dtype) - weight)
    assert not error[:size, 0].any()
    group = size if layout.block_size else len(weight)
    for start in range(0, len(weight), group):
        largest = np.abs(weight[start : start + group]).max(axis=0)
        step = largest / (2 ** (layout.bits - 1) - 1)
        # In blocks the scale of the least squares is taken, which may cut the largest weights by a quarter.
        most = np.maximum(0.55 * step, 0.26 * largest) if layout.block_size else 0.55 * step + 0.005 * largest
        assert (error[start : start + group] <= most + 1e-6).all()


def quantized_graph(traces: Traces, architecture: str, name: str, dtype: str = "float16") -> ir.Model:
    """The graph of a tiny model with its weights stored as ``name``."""
    return dequantize_weights(traces.optimized(architecture, dtype, STANDARD_DIALECT), name, VOCAB_SIZE)


class Quantized:
    """A tiny model's graph in fp16, its copy, and torch's fp32 logits [L, V] with the same rounded weights."""

    def __init__(self, traces: Traces, architecture: str, name: str, folder: Path) -> None:
        self.ids = np.random.default_rng(1).integers(3, VOCAB_SIZE, max(PAST) + W)
        model = rounded_model(architecture, torch.float16)
        self.is_tied = model.config.tie_word_embeddings
        self.spec = tiny_spec(model, "float16", STANDARD_DIALECT)
        graph = quantized_graph(traces, architecture, name)
        self.graph = graph
        ir.save(graph, folder / "half.onnx", external_data="half.data")
        self.half = Passes(folder / "half.onnx", self.spec, self.ids)
        ir.save(widen(ir.load(folder / "half.onnx")), folder / "fp32.onnx", external_data="copy.data")
        self.fp32_copy = Passes(folder / "fp32.onnx", replace(self.spec, dtype="float32"), self.ids)
        cast_weights(model, torch.float32)
        round_model(model, name)
        with torch.no_grad():
            tokens = torch.from_numpy(self.ids)[None]
            self.expected: Array = model(input_ids=tokens, use_cache=False).logits[0].numpy()
        self.scale = np.abs(self.expected).max()


def round_model(model: torch.nn.Module, name: str) -> None:
    """Round every matrix of ``model`` as the pass does."""
    model.set_attn_implementation("eager")  # type: ignore[operator]
    seen = set()
    for module in model.modules():
        parameter = getattr(module, "weight", None)
        if parameter is None or parameter.dim() != 2 or parameter.data_ptr() in seen:
            continue
        weight = parameter.data
        inputs_first = type(module).__name__ == "Conv1D"
        by_input = weight.numpy() if inputs_first else weight.numpy().T
        layout = TABLE if isinstance(module, torch.nn.Embedding) else layout_of(name, by_input.T.shape)
        new = dequantized(np.ascontiguousarray(by_input), layout, np.dtype(np.float16))
        weight.copy_(torch.from_numpy(np.ascontiguousarray(new if inputs_first else new.T)))
        seen.add(weight.data_ptr())


@pytest.fixture(scope="module", params=[(a, n) for a in ARCHITECTURES for n in NAMES], ids=lambda p: f"{p[0]}-{p[1]}")
def quantized(request: pytest.FixtureRequest, traces: Traces, tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    architecture, name = request.param
    return Quantized(traces, architecture, name, tmp_path_factory.mktemp("quantized"))


@pytest.mark.parametrize("precision", ["fp32_copy", "half"])
def test_rows_equal_single_rows_equal_the_rounded_model(quantized: Quantized, precision: str) -> None:
    assert quantized.scale > 0.1, "logits this small would hide an error"
    passes: Passes = getattr(quantized, precision)
    tolerance = 5 * TOLERANCE if precision == "fp32_copy" else HALF_TOLERANCE
    for past in PAST:
        for n in (1, 2, 3, W):
            expected = quantized.expected[past : past + n]
            for widths in ([n], [1] * n):
                error = np.abs(passes.logits(past, widths) - expected).max() / quantized.scale
                assert error <= tolerance, f"past {past}, passes of {widths}: {error:.2e}"


def test_every_matrix_is_stored_in_integers_and_once(quantized: Quantized) -> None:
    tensors = [v.const_value for v in quantized.graph.graph.initializers.values() if v.const_value is not None]
    floats = [t for t in tensors if t.dtype in (ir.DataType.FLOAT16, ir.DataType.FLOAT) and len(t.shape) == 2]
    assert [t.name for t in floats if "scales" not in str(t.name)] == []
    tables = [t for t in tensors if t.dtype == ir.DataType.INT8 and VOCAB_SIZE in tuple(t.shape)]
    assert len(tables) == (1 if quantized.is_tied else 2)


def test_a_pass_reads_all_but_a_table_that_only_lookups_read(traces: Traces) -> None:
    read = {}
    for architecture in ("llama", "llama-tied"):
        graph = quantized_graph(traces, architecture, "int8")
        matrices = [
            v.const_value.nbytes
            for v in graph.graph.initializers.values()
            if v.const_value is not None and v.dtype == ir.DataType.INT8
        ]
        read[architecture] = bytes_per_pass(graph)
        table = VOCAB_SIZE * 64
        assert 0 <= read[architecture] - (sum(matrices) - table * (architecture == "llama")) < 0.3 * sum(matrices)
    assert abs(read["llama"] - read["llama-tied"]) <= 64  # shapes and the scale of 1


@pytest.mark.slow
def test_bf16_graph_is_the_fp16_graph_but_for_dtypes(traces: Traces) -> None:
    names = ("float16", "bfloat16")
    half, brain = (nodes_of(quantized_graph(traces, "llama-rope-llama3", "int4", name)) for name in names)
    assert half == brain


@pytest.mark.parametrize("architecture", [*OTHERS, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_other_architectures_run(architecture: str, traces: Traces, tmp_path: Path) -> None:
    """The graph loads, honours the contract, and its logits are finite."""
    spec = tiny_spec(tiny_model(architecture), "float16", STANDARD_DIALECT)
    ir.save(quantized_graph(traces, architecture, "int4"), tmp_path / "m.onnx", external_data="m.data")
    passes = Passes(tmp_path / "m.onnx", spec, np.arange(3, 12))
    assert passes.engine.contract == model_contract(spec)
    logits = passes.logits(4, [2, 1])
    assert logits.shape == (3, VOCAB_SIZE) and np.isfinite(logits).all() and np.abs(logits).max() > 0.1, LOGITS


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"quantize": "w8a8"}, "--quantize w8a8: expected none, int8, int4 with backend tensorrt-rtx"),
        ({"draft": "self:w8a8"}, "--draft self:w8a8: expected self, self:int8, self:int4 with backend tensorrt-rtx"),
        ({"draft": "other", "draft_quantize": "w8a8"}, "--draft-quantize w8a8: expected none, int8, int4"),
        ({"quantize": "int4", "dtype": "fp32"}, "--dtype fp32: backend tensorrt-rtx runs fp16, bf16"),
    ],
)
def test_what_tensorrt_does_not_take_is_refused(changes: dict[str, str], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        ExportOptions("target", Path("bundle"), backend="tensorrt-rtx", **changes)  # type: ignore[arg-type]


def test_what_tensorrt_takes_is_accepted() -> None:
    options = ExportOptions("target", Path("bundle"), "self:int4", quantize="int8", dtype="bf16", backend="tensorrt")
    assert (options.quantize, options.draft_quantize) == ("int8", "int4")
