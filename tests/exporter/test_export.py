"""``export`` on a tiny pair: what it writes, and that what it wrote generates the models' own ids."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from transformers import AutoModelForCausalLM

import specrt
from specrt.engines.manifest import manifest_from_bundle
from specrt.engines.samplers import SAMPLER_NAMES
from specrt.engines.storage.integrity import check_files
from specrt.exporter.parity.reference import graph_logits
from tests.exporter.tiny_pair import MAX_SEQ_LEN, K, load_samplers


def _greedy(folder: Path, ids: list[int], num_tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = torch.tensor([ids])
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num_tokens, do_sample=False)
    return [int(token) for token in output[0, len(ids) :]]


def test_the_manifest_describes_the_bundle(pair: Path, models: dict[str, Path]) -> None:
    manifest = manifest_from_bundle(pair)
    check_files(pair, manifest, always_hash=True)
    on_disk = {path.relative_to(pair).as_posix() for path in pair.rglob("*") if path.is_file()}
    assert on_disk == {"bundle.json", *manifest.files}
    assert (pair / "target" / "LICENSE").read_text() == "a licence\n"
    assert manifest.draft.kind == "model"
    assert manifest.draft.model is not None
    assert manifest.draft.model.spec.max_seq_len == 64
    assert manifest.target.spec.capacity == MAX_SEQ_LEN + K
    assert manifest.target.parity.argmax_agreement == 1.0
    assert manifest.target.bytes_per_pass < manifest.target.weights_bytes
    for name in manifest.files:
        if name.endswith(".onnx"):
            onnx.checker.check_model(str(pair / name)) if "samplers" in name else onnx.load(pair / name)


def test_samplers_are_written_once_for_models_of_one_vocabulary(pair: Path) -> None:
    manifest = manifest_from_bundle(pair)
    draft = manifest.draft.model
    assert draft is not None
    paths = {name: f"samplers/{name}.onnx" for name in SAMPLER_NAMES}
    assert manifest.target.samplers == draft.samplers == paths
    assert {name for name in manifest.files if name.startswith("samplers/")} == set(paths.values())
    for entry in (manifest.target, draft):
        load_samplers(pair, entry, manifest.target.spec.vocab_size)


def test_generation_defaults_are_those_of_the_target_s_generation_config(pair: Path) -> None:
    """They are used on request only."""
    assert manifest_from_bundle(pair).generation_defaults == {"temperature": 0.6, "top_k": 20.0}
    with specrt.load(pair, threads=1) as runtime:
        plain = runtime.generate([5, 6, 7], max_new_tokens=1).settings
        asked = runtime.generate([5, 6, 7], max_new_tokens=1, model_defaults=True, top_p=0.5).settings
    assert (plain.temperature, plain.top_k, plain.top_p) == (0, 0, 1)
    assert (asked.temperature, asked.top_k, asked.top_p) == (0.6, 20, 0.5)


def test_reference_logits_are_reproduced_without_torch(pair: Path) -> None:
    entry = manifest_from_bundle(pair).target
    stored = np.load(pair / entry.reference)
    logits = graph_logits(pair / entry.graph, entry.spec, stored["ids"], threads=1)
    assert np.abs(logits[stored["positions"]] - stored["logits"]).max() <= 2 * entry.parity.max_abs_error + 1e-6


@pytest.mark.parametrize("draft", ["model", "ngram", "none"])
def test_moved_bundle_generates_the_models_own_ids(
    pair: Path, models: dict[str, Path], draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another working directory, after a move; over the draft's shorter context (64) and to the target's end."""
    moved = tmp_path / "else where"
    shutil.copytree(pair, moved)
    monkeypatch.chdir(tmp_path)
    with specrt.load("else where", threads=1) as runtime:
        ids = runtime.codec.encode("The quick brown fox")
        expected = _greedy(models["target"], ids, MAX_SEQ_LEN - len(ids))
        for k in range(K + 1):
            result = runtime.generate(ids, max_new_tokens=200, num_speculative_tokens=k, draft=draft)
            assert result.token_ids == expected, f"K = {k}"
        assert result.finish_reason == ("stop" if len(expected) < MAX_SEQ_LEN - len(ids) else "length")


def test_self_draft_accepts_everything(tiny_bundle: Path) -> None:
    assert manifest_from_bundle(tiny_bundle).draft.kind == "self"
    assert not (tiny_bundle / "draft").exists()
    with specrt.load(tiny_bundle, threads=1) as runtime:
        stats = runtime.generate([5, 6, 7], max_new_tokens=80, ignore_eos=True, num_speculative_tokens=K).stats
    assert stats.draft_acceptance_rate == 1.0
    assert stats.completion_tokens == 80
