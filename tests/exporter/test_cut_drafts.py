"""Drafts cut out of a model: some of its layers on the same weights, or logits of its first ids only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

import specrt
from specrt.engines.errors import UsageError
from specrt.engines.manifest import Manifest
from specrt.engines.resident import resident_memory
from specrt.engines.trt.build import _jobs
from specrt.exporter.cutting import choose_layers, keep_layers, restrict_head
from specrt.exporter.export import export
from specrt.exporter.options import ExportOptions
from tests.exporter.tracing.architectures import VOCAB_SIZE, tiny_model
from tests.exports import Exports
from tests.progress import KeptProgress

IDS = np.random.default_rng(0).integers(3, VOCAB_SIZE, 20)


def logits_of(model: object) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(IDS)[None], use_cache=False).logits[0]  # type: ignore[operator,no-any-return]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3", "qwen3"])
def test_layers_that_change_nothing_are_left_out(architecture: str) -> None:
    """Layers 0 and 2 of 4 put nothing into the residual stream, so the other two are the whole model."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2} if architecture.startswith("gemma") else {}
    model = tiny_model(architecture, num_hidden_layers=4, **kinds)
    with torch.no_grad():
        for index in (0, 2):
            for name, parameter in model.model.layers[index].named_parameters():
                if name.startswith(("self_attn.o_proj", "mlp.down_proj")):
                    parameter.zero_()
    whole = logits_of(model)
    assert choose_layers(model, 2, IDS) == (1, 3)
    keep_layers(model, (1, 3))
    assert model.config.num_hidden_layers == 2 and len(model.model.layers) == 2
    torch.testing.assert_close(logits_of(model), whole)


@pytest.mark.parametrize("architecture", ["llama", "llama-tied"])
def test_a_restricted_head_gives_the_first_logits_and_is_fed_every_id(architecture: str) -> None:
    model = tiny_model(architecture)
    whole = logits_of(model)
    restrict_head(model, 40)
    torch.testing.assert_close(logits_of(model), whole[:, :40])
    assert IDS.max() >= 40


@pytest.fixture(scope="module")
def model(exports: Exports) -> Path:
    return exports.model()


def answers(bundle: Path, manifest: Manifest) -> None:
    """With each rule the draft is used, and where the text is a function of target and seed, it is that text."""
    with specrt.load(bundle, threads=1) as runtime:
        plain = runtime.generate("the quick brown", max_new_tokens=24, draft="none", reproducible=True)
        drafted = runtime.generate(
            "the quick brown", max_new_tokens=24, draft="model", num_speculative_tokens=3, reproducible=True
        )
        assert drafted.token_ids == plain.token_ids and drafted.stats.drafted > 0
        for rule in ("match", "block"):
            result = runtime.generate(
                "the quick brown", max_new_tokens=24, draft="model", num_speculative_tokens=3, temperature=1.0,
                seed=3, rule=rule,
            )  # fmt: skip
            assert len(result.token_ids) == 24 or result.finish_reason == "stop"
            assert result.stats.drafted > 0


@pytest.mark.parametrize("quantize", [pytest.param("none", marks=pytest.mark.slow), "int8"])
def test_a_draft_of_the_target_s_layers_takes_no_weights_of_its_own(quantize: str, model: Path, tmp_path: Path) -> None:
    manifest = export(ExportOptions(str(model), tmp_path / "b", "skip:1", 4, quantize=quantize, prefill_chunk=64))
    entry = manifest.draft.model
    assert entry is not None and len(entry.spec.kv_layers) == 1 < len(manifest.target.spec.kv_layers)
    graph = tmp_path / "b" / entry.graph
    assert graph.stat().st_size < 100_000 and not graph.with_name(f"{graph.name}.data").exists()
    values = ir.load(graph).graph.initializers.values()
    external = [v.const_value for v in values if isinstance(v.const_value, ir.ExternalTensor)]
    assert external and {str(tensor.location) for tensor in external} == {"model.onnx.data"}
    assert entry.bytes_per_pass < manifest.target.bytes_per_pass
    assert (tmp_path / "b" / "draft" / "reference.npz").is_file()
    assert resident_memory(manifest)[0].mapped_bytes == manifest.target.weights_bytes, "one file, counted once"
    jobs = {job.name: job for job in _jobs(manifest, has_decode_profile=False)}
    weights = "target/model.onnx.data"
    assert jobs["draft"].sources(manifest)[weights] == jobs["target"].sources(manifest)[weights]
    answers(tmp_path / "b", manifest)


def test_a_draft_of_the_target_s_weights_is_loaded_and_traced_with_it(model: Path, tmp_path: Path) -> None:
    """And each is stored in its own bits: the target's graph is not what the draft is made of."""
    steps = KeptProgress()
    options = ExportOptions(str(model), tmp_path / "b", "self:int4", 4, quantize="int8", prefill_chunk=64)
    manifest = export(options, steps)
    for step in ("loading weights", "reference logits", "tracing"):
        assert [name for name in steps.steps if step in name] == [f"target: {step}"]
    entry = manifest.draft.model
    assert entry is not None and entry.weights_bytes < manifest.target.weights_bytes
    assert 0 < manifest.target.parity.mean_kl < entry.parity.mean_kl
    bits = [
        {
            node.attributes["bits"].as_int()
            for node in ir.load(tmp_path / "b" / graph).graph
            if "bits" in node.attributes
        }
        for graph in (manifest.target.graph, entry.graph)
    ]
    assert bits == [{8}, {4, 8}]
    answers(tmp_path / "b", manifest)


@pytest.mark.parametrize("draft", [pytest.param("model", marks=pytest.mark.slow), "self:int8"])
def test_a_draft_with_a_restricted_head(draft: str, model: Path, tmp_path: Path) -> None:
    name = str(model) if draft == "model" else draft
    manifest = export(ExportOptions(str(model), tmp_path / "b", name, 4, prefill_chunk=64, draft_vocab=200))
    entry, whole = manifest.draft.model, manifest.target.spec.vocab_size
    assert entry is not None and entry.spec.vocab_size == 200 and entry.spec.num_input_ids == whole > 200
    assert entry.spec.knows(whole - 1) and not entry.spec.knows(whole)
    assert entry.bytes_per_pass < manifest.target.bytes_per_pass
    answers(tmp_path / "b", manifest)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"draft": "skip:"}, "--draft skip:: expected skip:N"),
        ({"draft": "skip:0"}, "--draft skip:0: expected skip:N"),
        ({"draft": "skip:-1"}, "--draft skip:-1: expected skip:N"),
        ({"draft": "skip:x"}, "--draft skip:x: expected skip:N"),
        ({"draft": "skip:1", "draft_quantize": "int8"}, "--draft-quantize: --draft skip:1 uses the target's weights"),
        ({"draft": "skip:1", "draft_dtype": "fp16"}, "--draft-dtype: --draft skip:1 uses the target's weights"),
        ({"draft": "skip:1", "draft_vocab": 9}, "--draft-vocab: --draft skip:1 uses the target's weights"),
        ({"draft": "ngram", "draft_vocab": 9}, "--draft-vocab 9: draft ngram has no head"),
        ({"draft": "self", "draft_vocab": 9}, "--draft-vocab 9: draft self has no head"),
        ({"draft": "self:int8", "draft_vocab": 1}, "--draft-vocab 1: expected 2 or more"),
    ],
)
def test_options_that_do_not_go_together(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        ExportOptions("target", Path("out"), **changes)


def test_more_than_there_is(model: Path, tmp_path: Path) -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"draft": "skip:99"}, "the target has 2 layers; keep fewer"),
        ({"draft": "self:int8", "draft_vocab": 10**6}, "expected fewer than the draft's"),
    )
    for changes, line in cases:
        with pytest.raises(UsageError, match=line):
            export(ExportOptions(str(model), tmp_path / "b", prefill_chunk=64, **changes))
        assert not (tmp_path / "b").exists()
