"""Rope of GGUF files: each kind of scaling against the equivalent transformers model, beyond the original length."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import specrt
from specrt.engines.errors import SourceError, SpecrtError, UnsupportedModelError
from specrt.exporter.export import export
from specrt.exporter.options import ExportOptions
from specrt.exporter.sources.loading import load_model
from specrt.exporter.sources.source import find_config, find_source
from tests.exporter.sources.gguf.gguf_files import config_of, model_of, write_gguf

ORIGINAL = 64
LENGTH = 3 * ORIGINAL
IDS = (torch.arange(LENGTH) * 7 % 300 + 3)[None]
ARBITRARY = np.array([1, 1, 1, 2, 4, 8, 8, 8], np.float32)
SHORT, LONG = np.linspace(1.0, 1.4, 8, dtype=np.float32), np.linspace(1.0, 9.0, 8, dtype=np.float32)
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


def longrope(**others: Any) -> dict[str, Any]:
    return {
        "original_max_position_embeddings": ORIGINAL,
        **rope(rope_type="longrope", short_factor=SHORT.tolist(), long_factor=LONG.tolist(), **others),
    }


def factors_of(parameters: dict[str, Any]) -> np.ndarray:
    """What a converter writes as rope_freqs for a Llama 3.1: by how much each frequency is divided."""
    plain, scaled = (model_of(config_of("llama", **how)) for how in ({}, {"rope_parameters": dict(parameters)}))
    return np.asarray(plain.model.rotary_emb.inv_freq / scaled.model.rotary_emb.inv_freq)


def scaling(kind: str, **keys: Any) -> dict[str, Any]:
    return {"rope.scaling.type": kind, **{f"rope.scaling.{name}": value for name, value in keys.items()}}


# Architecture; overrides of the equivalent config; the file's keys; its tensors of factors.
EQUIVALENT: dict[str, tuple[str, dict[str, Any], dict[str, Any], Any]] = {
    "plain": ("llama", {}, {}, dict),
    "ones": ("llama", {}, {}, lambda: {"rope_freqs.weight": np.ones(8, np.float32)}),
    "none": ("llama", {}, scaling("none", factor=4.0), dict),
    "llama3": ("llama", {"rope_parameters": LLAMA3}, {}, lambda: {"rope_freqs.weight": factors_of(LLAMA3)}),
    "linear": ("llama", rope(rope_type="linear", factor=4.0), scaling("linear", factor=4.0), dict),
    "linear, qwen3": ("qwen3", rope(rope_type="linear", factor=4.0), scaling("linear", factor=4.0), dict),
    "linear, by the old key": ("qwen2", rope(rope_type="linear", factor=4.0), {"rope.scale_linear": 4.0}, dict),
    "linear, without a type": ("qwen2", rope(rope_type="linear", factor=4.0), {"rope.scaling.factor": 4.0}, dict),
    "yarn": ("llama", {"rope_parameters": YARN}, scaling("yarn", factor=4.0, original_context_length=ORIGINAL), dict),
    "yarn, qwen2": (
        "qwen2",
        {"rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}},
        scaling("yarn", factor=4.0, original_context_length=ORIGINAL, yarn_beta_fast=16.0, yarn_beta_slow=2.0),
        dict,
    ),
    "yarn, with mscale": (
        "llama",
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
        scaling("yarn", factor=4.0, original_context_length=ORIGINAL, yarn_log_multiplier=0.5),
        dict,
    ),
    "yarn, of the context": ("llama", {"rope_parameters": YARN}, scaling("yarn", factor=4.0), dict),
    "longrope": (
        "phi3",
        {"partial_rotary_factor": 1.0, **longrope(attention_factor=1.2)},
        {"rope.dimension_count": 16, "rope.scaling.attn_factor": 1.2,
         "rope.scaling.original_context_length": ORIGINAL, "context_length": 256},
        lambda: {"rope_factors_short.weight": SHORT, "rope_factors_long.weight": LONG},
    ),
}  # fmt: skip


def logits(model: Any) -> torch.Tensor:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits[0, ORIGINAL:]  # what is beyond the original length
    return found


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("case", EQUIVALENT)
def test_a_file_answers_as_the_model_of_the_equivalent_config(case: str, tmp_path: Path) -> None:
    architecture, overrides, keys, tensors = EQUIVALENT[case]
    model = model_of(config_of(architecture, **overrides))
    path = write_gguf(tmp_path / "model.gguf", model, architecture, keys, tensors())
    loaded = load_model(find_source(str(path)), torch.float32).model
    assert difference(logits(loaded), logits(model)) < 1e-4
    if overrides:
        plain = load_model(
            find_source(str(write_gguf(tmp_path / "plain.gguf", model, architecture))), torch.float32
        ).model
        assert difference(logits(plain), logits(model)) > 1e-2, "the scaling makes no difference here"


def with_factors(model: Any, factors: np.ndarray) -> Any:
    """``model`` with its frequencies divided by hand."""
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq / torch.from_numpy(factors)
    return model


@pytest.mark.parametrize("factor", [1.0, 2.0], ids=["alone", "with linear"])
def test_arbitrary_factors_divide_the_frequencies(factor: float, tmp_path: Path) -> None:
    plain = model_of(config_of("llama"))
    keys = {} if factor == 1.0 else scaling("linear", factor=factor)
    path = write_gguf(tmp_path / "model.gguf", plain, keys=keys, tensors={"rope_freqs.weight": ARBITRARY})
    loaded = logits(load_model(find_source(str(path)), torch.float32).model)
    assert difference(loaded, logits(plain)) > 1e-2
    assert difference(loaded, logits(with_factors(plain, ARBITRARY * factor))) < 1e-4


def test_yarn_is_llama_cpp_s() -> None:
    """ggml's rope_yarn, written out: angles at position 1 and the scale of cos and sin."""
    model = model_of(config_of("llama", rope_parameters={**YARN, "beta_fast": 8.0, "beta_slow": 2.0}))
    dims, base, factor = 16, 10000.0, 4.0

    def corrected(rotations: float) -> float:
        return dims * math.log(ORIGINAL / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(0, math.floor(corrected(8.0))), min(dims - 1, math.ceil(corrected(2.0)))
    angles = []
    for pair in range(dims // 2):
        unscaled = base ** (-2 * pair / dims)
        ramp = 1 - min(1.0, max(0.0, (pair - low) / max(0.001, high - low)))
        angles.append(unscaled / factor * (1 - ramp) + unscaled * ramp)
    np.testing.assert_allclose(model.model.rotary_emb.inv_freq, angles, rtol=1e-6)
    assert model.model.rotary_emb.attention_scaling == pytest.approx(1 + 0.1 * math.log(factor))


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], type[SpecrtError], str]] = {
    "unknown type": ("llama", scaling("ntk", factor=2.0), {}, UnsupportedModelError, "rope.scaling.type is 'ntk'"),
    "alpha": ("llama", {"rope.scaling.alpha": 10.0}, {}, UnsupportedModelError, "llama.rope.scaling.alpha"),
    "sections": ("qwen2", {"rope.dimension_sections": [4, 4, 0, 0]}, {}, UnsupportedModelError, "dimension_sections"),
    "negative": ("llama", scaling("linear", factor=-2.0), {}, SourceError, "rope.scaling.factor is -2"),
    "text": ("llama", scaling("linear", factor="4"), {}, SourceError, "rope.scaling.factor is '4', expected a number"),
    "attention factor": ("llama", scaling("linear", factor=2.0, attn_factor=1.5), {}, UnsupportedModelError, "is 1.5"),
    "yarn extrapolation": (
        "llama", scaling("yarn", factor=2.0, yarn_ext_factor=0.5), {}, UnsupportedModelError, "yarn_ext_factor is 0.5"),
    "yarn attention": (
        "llama", scaling("yarn", factor=2.0, yarn_attn_factor=0.5), {}, UnsupportedModelError, "yarn_attn_factor is"),
    "yarn and factors": (
        "llama", scaling("yarn", factor=2.0), {"rope_freqs.weight": ARBITRARY}, UnsupportedModelError, "yarn and"),
    "yarn in phi3": ("phi3", scaling("yarn", factor=2.0), {}, UnsupportedModelError, "type yarn in phi3"),
    "factors in gemma3": (
        "gemma3", {}, {"rope_freqs.weight": np.full(16, 2.0)}, UnsupportedModelError, "type longrope in gemma3"),
    "longrope without factors": ("phi3", scaling("longrope"), {}, SourceError, "rope_factors_short.weight"),
    "one of two": ("phi3", {}, {"rope_factors_long.weight": LONG[:4]}, UnsupportedModelError, "only rope_factors_long"),
    "zero factors": ("llama", {}, {"rope_freqs.weight": ARBITRARY * 0}, SourceError, "expected 8 positive numbers"),
    "local base": ("llama", {"rope.freq_base_swa": 5.0}, {}, UnsupportedModelError, "llama.rope.freq_base_swa"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_transformers_does_not_compute_is_refused(case: str, tmp_path: Path) -> None:
    architecture, keys, tensors, error, line = REFUSED[case]
    path = write_gguf(tmp_path / "model.gguf", model_of(config_of(architecture)), architecture, keys, tensors)
    with pytest.raises(error) as caught:
        find_config(str(path))
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_factors_reach_the_graph(tmp_path: Path) -> None:
    """An exported bundle gives the ids of the model whose frequencies are divided by hand, and not of the plain one."""
    plain = model_of(config_of("llama", max_position_embeddings=128))
    path = write_gguf(
        tmp_path / "model.gguf", plain, keys={"context_length": 128}, tensors={"rope_freqs.weight": ARBITRARY}
    )
    export(ExportOptions(str(path), tmp_path / "bundle", draft="ngram", max_seq_len=128))
    prompt = IDS[0, :40].tolist()
    with specrt.load(tmp_path / "bundle", threads=1) as runtime:
        ids = runtime.generate(prompt, max_new_tokens=40, ignore_eos=True, draft="none").token_ids
    assert ids != greedy(plain, prompt)
    assert ids == greedy(with_factors(plain, ARBITRARY), prompt)


def greedy(model: Any, prompt: list[int]) -> list[int]:
    model.set_attn_implementation("eager")
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(40):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
