"""Heads of sizes that no kernel takes: padded in graph and KV, and the ids are those of the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf

import specrt
from specrt.engines.contract import KVLayer
from specrt.engines.trt.build import build
from specrt.exporter.export import export
from specrt.exporter.options import ExportOptions
from specrt.exporter.tracing import emission
from specrt.exporter.tracing.observe import observe
from specrt.exporter.tracing.state import AttentionSite
from tests.exporter.tracing.architectures import tiny_config
from tests.exporter.tracing.model_check import TOLERANCE, compare
from tests.exports import Exports
from tests.tiny import save_tiny_model

SIZES = {1: 8, 2: 8, 4: 8, 5: 8, 6: 8, 7: 8, 8: 8, 12: 16, 20: 24, 64: 64, 100: 104, 250: 256, 576: 576}
NUM_IDS = 40


@pytest.mark.parametrize("size", [size for size in SIZES if size % 2 == 0])
def test_the_kv_cache_has_the_padded_size_and_the_scale_the_model_s(size: int) -> None:
    observation = observe(tiny_config("llama", head_dim=size))
    assert observation.kv_layers == (KVLayer(2, SIZES[size]),) * 2
    assert [site.scale for site in observation.sites] == pytest.approx([size**-0.5] * 2)
    assert [site.head_dim for site in observation.sites] == [size] * 2


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in SIZES for value in (1, 12, key)])
def test_keys_and_values_are_padded_to_the_larger_of_both(key: int, value: int) -> None:
    site = AttentionSite(4, 2, key, 1.0, 0.0, None, value)
    assert site.kv_head_dim == max(SIZES[key], SIZES[value])


def _wrong_scale(site: AttentionSite) -> AttentionSite:
    return replace(site, scale=site.kv_head_dim**-0.5)


def test_a_scale_of_the_padded_size_would_be_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison that all exported rows pass fails when the scale is that of the padding."""
    right = emission.emit
    monkeypatch.setattr(
        "specrt.exporter.tracing.attention.emit",
        lambda state, layer, site, *states: right(state, layer, _wrong_scale(site), *states),
    )
    found = compare(tiny_config("llama", head_dim=6, num_hidden_layers=1))
    assert not found.is_equal and found.error > 10 * TOLERANCE


@pytest.fixture(scope="module")
def model(exports: Exports) -> Path:
    return exports.model(head_dim=12)


@pytest.fixture(scope="module")
def expected(model: Path) -> tuple[list[int], list[int]]:
    """A prompt and transformers' greedy ids."""
    prompt = np.random.default_rng(0).integers(3, 250, 9)
    target = hf.AutoModelForCausalLM.from_pretrained(model)
    ids = target.generate(torch.from_numpy(prompt)[None], max_new_tokens=NUM_IDS, do_sample=False, eos_token_id=None)
    assert len(set(ids[0, 9:].tolist())) > 5, "a text of few ids would hide an error"
    return prompt.tolist(), ids[0, 9:].tolist()


@pytest.mark.parametrize("draft", ["self:int4", pytest.param("skip:1", marks=pytest.mark.slow)])
def test_drafts_that_share_kv_or_layers_give_transformers_ids(
    draft: str, model: Path, expected: tuple[list[int], list[int]], tmp_path: Path
) -> None:
    manifest = export(ExportOptions(str(model), tmp_path / "b", draft, 4, prefill_chunk=64))
    assert manifest.draft.model is not None and manifest.draft.shares_kv == draft.startswith("self:")
    for entry in (manifest.target, manifest.draft.model):
        assert set(entry.spec.kv_layers) == {KVLayer(2, 16)}
    spec = manifest.target.spec
    assert spec.kv_bytes == 2 * 2 * 2 * 16 * spec.capacity * 4
    prompt, ids = expected
    with specrt.load(tmp_path / "b", threads=1) as runtime:
        result = runtime.generate(prompt, max_new_tokens=NUM_IDS, ignore_eos=True, temperature=0, draft="model")
    assert result.token_ids == ids
    assert result.stats.drafted > 0 and (draft != "self:int4" or result.stats.accepted > 0)


@pytest.mark.slow
@pytest.mark.parametrize("size", [12, 264])
def test_tensorrt_builds_other_head_sizes(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fused attention would build neither 12 nor 264. By default test_cache_copies.py builds heads of 12."""
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
    model = save_tiny_model(tmp_path / "model", head_dim=size, num_hidden_layers=1)
    options = ExportOptions(str(model), tmp_path / "b", "ngram", 3, 96, 32, backend="tensorrt-rtx")
    assert set(export(options).target.spec.kv_layers) == {KVLayer(2, -(-size // 8) * 8)}
    assert build(tmp_path / "b", "tensorrt-rtx").engines["target"].num_bytes > 0
