"""Quantized weights: the graph answers as the model with its weights rounded, and tables are stored once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import specrt
from specrt.engines.contract import (
    INPUT_IDS,
    LOGITS,
    POSITION_IDS,
    ROW_INDICES,
    SEQLENS_K,
    TOTAL_SEQUENCE_LENGTH,
    ModelSpec,
    model_contract,
)
from specrt.engines.errors import UsageError
from specrt.engines.interface import Array
from specrt.engines.manifest import manifest_from_bundle
from specrt.engines.ort.cpu import OrtEngine
from specrt.exporter.options import ExportOptions
from specrt.exporter.quantization import blocks
from specrt.exporter.quantization.blocks import (
    QUANTIZATIONS,
    TABLE,
    Quantization,
    quantize_weights,
    quantized,
    quantized_in_4_bits,
)
from specrt.runtime.options import Options
from tests.exporter.tracing.architectures import VOCAB_SIZE, tiny_model
from tests.exporter.tracing.traces import Traces, tiny_spec
from tests.exports import Exports

NUM_IDS = 9
BLOCKWISE = sorted(name for name, quantization in QUANTIZATIONS.items() if quantization.block_size)


def dequantized(weight: Array, quantization: Quantization, with_offsets: bool = False) -> Array:
    """``weight`` [K, N] after a round trip through its blocks, by the layout's definition; offsets are added."""
    num_columns, size = len(weight), quantization.block_size
    if quantization.bits == 4:
        data, scales, zero_points = quantized_in_4_bits(weight.T, quantization, with_offsets)
        values = np.stack([data & 15, data >> 4], axis=-1).reshape(*scales.shape, -1)  # the low half first
        zeros = np.stack([zero_points & 15, zero_points >> 4], axis=-1).reshape(len(scales), -1)
    else:
        values, scales, zeros = quantized(weight, quantization)
    zero = zeros[:, : scales.shape[1], None] if quantization.has_zero_points else 2 ** (quantization.bits - 1)
    rows = ((values.astype(np.float32) - zero) * scales[..., None]).reshape(len(scales), -1)  # [N, B * block]
    result: Array = rows[:, :num_columns].T
    if with_offsets:
        offsets = rows[:, num_columns : num_columns + num_columns // size]  # [N, B]
        result = result + np.repeat(offsets, size, axis=1).T
    return result


@given(shape=st.tuples(st.integers(1, 300), st.integers(1, 20)), seed=st.integers(0, 1000))
def test_no_weight_in_8_bits_is_off_by_more_than_half_a_step(shape: tuple[int, int], seed: int) -> None:
    weight = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    error = np.abs(dequantized(weight, TABLE) - weight)
    for start in range(0, shape[0], TABLE.block_size):
        rows = slice(start, start + TABLE.block_size)
        step = 2 * np.abs(weight[rows]).max(axis=0) / 255  # the largest is cut by one step
        assert (error[rows] <= 1.1 * step + 1e-6).all()


def tiny_graph(traces: Traces, architecture: str, name: str) -> ir.Model:
    """The graph of ``tiny_model(architecture)`` with its weights stored as ``name``."""
    return quantize_weights(traces.optimized(architecture), name, VOCAB_SIZE)


def _logits(graph: ir.Model, spec: ModelSpec, ids: Array, folder: Path) -> Array:
    ir.save(graph, folder / "model.onnx", external_data="model.onnx.data")
    binding = OrtEngine(folder / "model.onnx", model_contract(spec), threads=1).open()
    host, count = binding.host, len(ids)
    host[INPUT_IDS][0, :count], host[POSITION_IDS][0, :count] = ids, np.arange(count)
    host[SEQLENS_K][0], host[TOTAL_SEQUENCE_LENGTH][0] = count - 1, count
    host[ROW_INDICES][:count] = np.arange(count)
    binding.run(count, count)
    return host[LOGITS][:count].copy()


@pytest.mark.parametrize("architecture", ["llama", "llama-tied", "qwen2", "gemma3"])
@pytest.mark.parametrize("name", BLOCKWISE)
def test_the_graph_answers_as_the_model_with_rounded_weights(
    architecture: str, name: str, traces: Traces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With activations in fp32 (accuracy level 0), so that only the weights differ from the torch model's own."""
    monkeypatch.setitem(blocks.ACCURACY_LEVEL, ir.DataType.FLOAT, 0)
    model = tiny_model(architecture)
    ids = np.random.default_rng(2).integers(3, VOCAB_SIZE, NUM_IDS)
    got = _logits(tiny_graph(traces, architecture, name), tiny_spec(model), ids, tmp_path)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if weight is not None and weight.dim() == 2:
                is_table = weight.shape[0] == VOCAB_SIZE
                quantization = TABLE if is_table else QUANTIZATIONS[name]
                rounded = dequantized(weight.numpy().T.copy(), quantization).T
                weight.data = torch.from_numpy(rounded.copy())
        expected = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()
    assert np.abs(got - expected).max() <= 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("name", sorted(QUANTIZATIONS))
def test_nothing_large_is_left_in_fp32(name: str, traces: Traces) -> None:
    graph = tiny_graph(traces, "llama-tied", name)
    values = [v for v in graph.graph.initializers.values() if v.const_value is not None]
    large = {
        str(v.name): v.dtype
        for v in values
        if v.dtype == ir.DataType.FLOAT and v.const_value is not None and v.const_value.nbytes > 4 * 32 * 32
        if not any(part in str(v.name) for part in ("scales", "cos", "sin"))
        if not any(node.op_type == "GroupQueryAttention" for node, _ in v.uses())
    }
    assert large == {}
    blocks = [
        v for v in values if v.dtype == ir.DataType.UINT8 and v.const_value is not None and len(v.const_value.shape)
    ]
    tables = [v for v in blocks if v.const_value is not None and v.const_value.shape[0] == VOCAB_SIZE]
    assert len(tables) == 1, "a tied table is stored once"


@pytest.mark.parametrize(
    ("quantize_target", "draft"),
    [("int8", "ngram"), ("w8a8", "ngram"), ("int4", "self:int8"), ("none", "self:int8"), ("none", "self:int4")],
)
def test_quantized_bundles_generate_their_target_s_own_text(quantize_target: str, draft: str, exports: Exports) -> None:
    bundle = exports.bundle(exports.model(), draft, quantize=quantize_target, prefill_chunk=64)
    manifest = manifest_from_bundle(bundle)
    assert manifest.target.quantization == quantize_target
    most_kl, most_bytes = {
        "none": (1e-6, 450_000),
        "int8": (0.05, 240_000),
        "w8a8": (0.2, 240_000),
        "int4": (0.9, 160_000),
    }[quantize_target]
    assert manifest.target.parity.mean_kl < most_kl
    assert manifest.target.weights_bytes < most_bytes
    if ":" in draft:
        assert manifest.draft.model is not None
        assert (manifest.draft.kind, manifest.draft.model.quantization) == ("model", draft.partition(":")[2])
    with specrt.load(bundle, threads=1) as runtime:
        prompt = "In the morning the birds sing"
        for temperature, seed in ((0.0, None), (0.8, 3)):
            ways = [
                Options(
                    max_new_tokens=40,
                    num_speculative_tokens=k,
                    temperature=temperature,
                    seed=seed,
                    reproducible=True,
                    ignore_eos=True,
                )
                for k in (0, 4)
            ]
            plain, drafted = (runtime.generate(prompt, **way) for way in ways)
            assert drafted.token_ids == plain.token_ids
        if (quantize_target, draft) == ("none", "self:int8"):
            assert drafted.stats.draft_acceptance_rate is not None and drafted.stats.draft_acceptance_rate > 0.3


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"quantize": "int3"}, "--quantize int3: expected none, int8, w8a8, int4"),
        ({"draft_quantize": "int8"}, "draft ngram has no weights of its own"),
        ({"draft": "self", "draft_quantize": "int8"}, "draft self has no weights of its own"),
        ({"draft": "self:int2"}, "--draft self:int2: expected self, self:int8, self:w8a8, self:int4"),
        ({"draft": "self:int8", "draft_quantize": "int4"}, "leave one out"),
        ({"quantize": "w8a8", "dtype": "fp16"}, "its activations are fp32, got fp16"),
    ],
)
def test_options_that_do_not_go_together_are_refused(changes: dict[str, str], line: str) -> None:
    with pytest.raises(UsageError, match=line.replace("(", r"\(")):
        ExportOptions("target", Path("bundle"), **changes)  # type: ignore[arg-type]
