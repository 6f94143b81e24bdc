"""What TensorRT-RTX's builder copies of the KV cache in a pass, from the layers that it lists. No GPU is needed.

The recorded minimum is two copies a layer, keys and values, of the KV heads only, in passes of several tokens, and none
in passes of one token where ``Attention`` is an operator. docs/gpu.md has the forms that were compared.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import onnx_ir as ir
import pytest

from specrt.engines.contract import STANDARD_DIALECT, ModelSpec, model_contract
from specrt.engines.manifest import Manifest
from specrt.engines.trt.build import _Builder, _Job
from specrt.engines.trt.decode import OneTokenPasses
from specrt.engines.trt.layers import EngineLayers, cache_copies, copied_bytes
from specrt.engines.trt.library import load_library
from specrt.engines.trt.profiles import DECODE, PREFILL, VERIFY, profiles_of
from specrt.exporter import passes
from specrt.tools.lab.engine_layers import engine_layers
from tests.exporter.tracing.architectures import tiny_model
from tests.exporter.tracing.traces import Traces, tiny_spec
from tests.progress import KeptProgress

HALF_BYTES = 2
FUSED = ("llama", "qwen3", "mistral")  # mistral has a window
IN_SINGLE_OPERATORS = ("gemma2-head-of-12", "llama-head-of-320")  # a soft cap, and heads beyond the operator


def spec_of(name: str) -> ModelSpec:
    return tiny_spec(tiny_model(name), "float16", STANDARD_DIALECT)


def built(graph: ir.Model, spec: ModelSpec, folder: Path) -> EngineLayers:
    """The layers of an engine of a tiny model's graph."""
    ir.save(graph, folder / "g.onnx", external_data="g.data")
    contract = model_contract(spec)
    return engine_layers(folder / "g.onnx", contract, profiles_of(contract, has_decode=True))


QUICK = (FUSED[0], IN_SINGLE_OPERATORS[0])
ROWS = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in (*FUSED, *IN_SINGLE_OPERATORS)]


@pytest.mark.parametrize("name", ROWS)
def test_a_pass_copies_no_more_than_the_kv_heads_once(name: str, traces: Traces, tmp_path: Path) -> None:
    spec = spec_of(name)
    engine = built(traces.optimized(name, "float16", STANDARD_DIALECT), spec, tmp_path)
    layer = spec.kv_layers[0]
    most_bytes = layer.num_kv_heads * (spec.capacity + spec.capacity % 2) * layer.head_dim * HALF_BYTES
    for profile in (VERIFY, PREFILL, DECODE):
        copies = cache_copies(engine.layers[profile], spec.capacity, layer.head_dim)
        assert all(copied_bytes([copy], spec.max_width) <= most_bytes for copy in copies), profile
        expected = 0 if profile == DECODE and name in FUSED else 2 * len(spec.kv_layers)
        assert len(copies) == expected, f"{profile}: {copies}"


def test_without_the_reshape_a_copy_has_all_query_heads(
    traces: Traces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason for the pass. When a version of the builder fails this, the pass may go."""
    monkeypatch.setattr(passes, "reshape_cache_reads", lambda model: model)
    spec = spec_of("llama")
    engine = built(passes.optimize(traces.raw("llama", "float16", STANDARD_DIALECT), spec), spec, tmp_path)
    layer = spec.kv_layers[0]
    copies = cache_copies(engine.layers[VERIFY], spec.capacity, layer.head_dim)
    num_heads = tiny_model("llama").config.num_attention_heads
    all_heads_bytes = num_heads * spec.capacity * layer.head_dim * HALF_BYTES
    assert [copied_bytes([copy], 1) for copy in copies] == [all_heads_bytes] * 2 * len(spec.kv_layers)


@pytest.mark.parametrize(
    ("name", "has_decode"), [pytest.param(FUSED[0], True, marks=pytest.mark.slow), (IN_SINGLE_OPERATORS[0], False)]
)
def test_what_a_draft_s_engines_copy_decides_whether_it_has_decode(
    name: str, has_decode: bool, traces: Traces, tmp_path: Path
) -> None:
    """Attention in single operators copies in passes of one token too; by sizes alone it would have the profile."""
    spec = spec_of(name)
    ir.save(traces.optimized(name, "float16", STANDARD_DIALECT), tmp_path / "g.onnx", external_data="g.data")
    contract, passes = model_contract(spec), OneTokenPasses(spec, spec.kv_bytes)
    assert passes.are_expected_to_gain
    job = _Job("draft", "g.onnx", (), contract, spec.dtype, profiles_of(contract), passes)
    builder = _Builder(load_library("tensorrt-rtx"), [], tmp_path, has_timings=False)
    steps, nothing = KeptProgress(), cast(Manifest, SimpleNamespace(files={}))
    entry = builder.build(job, tmp_path, tmp_path, nothing, steps)
    assert (DECODE in entry.profiles) == has_decode
    without, having = entry.candidates
    assert without.profiles == (VERIFY, PREFILL) and having.profiles == (VERIFY, PREFILL, DECODE)
    assert without.copied_bytes >= spec.kv_bytes and having.copied_bytes == (0 if has_decode else without.copied_bytes)
    assert having.weights_bytes > without.weights_bytes
    (note,) = steps.notes
    assert "draft: a pass of one token" in note and note.endswith(f"built {'with' if has_decode else 'without'} it")
