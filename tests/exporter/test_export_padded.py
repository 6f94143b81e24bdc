"""A pair of one tokenizer whose embedding tables have other sizes: separate samplers, and no id that one lacks."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import specrt
from specrt.engines.manifest import DraftEntry, manifest_from_bundle
from specrt.engines.numpy_samplers import filtered
from specrt.engines.samplers import SAMPLER_NAMES
from specrt.engines.storage.integrity import check_files
from specrt.exporter.bundle import file_entries, write_manifest
from specrt.exporter.parity.reference import graph_logits
from specrt.exporter.samplers import write_samplers
from tests.exporter.tiny_pair import K, export_tiny, load_samplers, set_generation_config
from tests.tiny import tiny_tokenizer

PADDING = 40  # ids beyond the tokenizer's


def _off_by_a_little(source: Path, folder: Path, vocab_size: int) -> Path:
    """``source`` with another vocabulary size and noise in its weights: its drafts are accepted now and then."""
    model = AutoModelForCausalLM.from_pretrained(source)
    torch.manual_seed(1)
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.std() * 0.05)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def wider_draft(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair of one tokenizer, whose draft has more ids than the tokenizer. The target's config is greedy."""
    root = tmp_path_factory.mktemp("padded")
    target = shutil.copytree(models["target"], root / "target")
    set_generation_config(target, do_sample=False, temperature=0.7, top_p=0.9, repetition_penalty=1.1)
    draft = _off_by_a_little(target, root / "draft", len(tiny_tokenizer()) + PADDING)
    export_tiny({"target": target}, root / "bundle", draft=str(draft))
    return root / "bundle"


def _swap_roles(bundle: Path, output: Path) -> Path:
    """The bundle that an export of the same models in the other roles would be, without its time."""
    shutil.copytree(bundle, output, ignore=shutil.ignore_patterns("samplers"))
    manifest = manifest_from_bundle(bundle)
    target, draft = manifest.draft.model, manifest.target
    assert target is not None
    vocab_size = target.spec.vocab_size
    target = replace(target, samplers=write_samplers(output, "samplers", target.spec, vocab_size))
    draft = replace(draft, samplers=write_samplers(output, "samplers/draft", draft.spec, vocab_size))
    files = file_entries(output)
    write_manifest(output, replace(manifest, target=target, draft=DraftEntry("model", draft), files=files))
    return output


@pytest.fixture(scope="module", params=["wider draft", "wider target"])
def padded(request: pytest.FixtureRequest, wider_draft: Path) -> Path:
    if request.param == "wider draft":
        return wider_draft
    return _swap_roles(wider_draft, wider_draft.with_name("swapped"))


def test_a_draft_of_another_padded_vocabulary_has_samplers_of_its_own(padded: Path) -> None:
    manifest = manifest_from_bundle(padded)
    target, draft = manifest.target, manifest.draft.model
    assert draft is not None
    assert abs(target.spec.vocab_size - draft.spec.vocab_size) == PADDING
    assert target.samplers == {name: f"samplers/{name}.onnx" for name in SAMPLER_NAMES}
    assert draft.samplers == {name: f"samplers/draft/{name}.onnx" for name in SAMPLER_NAMES}
    written = {name for name in manifest.files if name.startswith("samplers/")}
    assert written == {*target.samplers.values(), *draft.samplers.values()}
    check_files(padded, manifest, always_hash=True)
    for entry in (target, draft):
        load_samplers(padded, entry, target.spec.vocab_size)


def test_a_model_that_does_not_sample_is_greedy_by_its_defaults(wider_draft: Path) -> None:
    assert manifest_from_bundle(wider_draft).generation_defaults == {"temperature": 0.0, "repetition_penalty": 1.1}
    with specrt.load(wider_draft, threads=1) as runtime:
        settings = runtime.generate([5, 6, 7], max_new_tokens=1, model_defaults=True).settings
    assert (settings.temperature, settings.top_p, settings.repetition_penalty) == (0, 1, 1.1)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_match_gives_the_target_s_own_ids_with_a_padded_vocabulary(padded: Path, temperature: float) -> None:
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": temperature, "ignore_eos": True}
    accepted = 0
    with specrt.load(padded, threads=1) as runtime:
        ids = runtime.codec.encode("The quick brown fox")
        for seed in range(6):
            expected = runtime.generate(ids, **options, seed=seed, num_speculative_tokens=0)
            for k in (1, K):
                result = runtime.generate(ids, **options, seed=seed, num_speculative_tokens=k, rule="match")
                assert (result.token_ids, result.text) == (expected.token_ids, expected.text), f"seed {seed}, K = {k}"
                accepted += result.stats.accepted
    assert accepted > 0


def test_ids_without_text_are_the_target_s_own_draws(padded: Path) -> None:
    """As in transformers: they are drawn, counted and have log-probabilities, and decode to nothing; drafts or not."""
    num_tokens = len(tiny_tokenizer())
    bare = 0
    with specrt.load(padded, threads=1) as runtime:
        for seed in (3, 4, 5):
            options: dict[str, Any] = {"max_new_tokens": 60, "temperature": 2.0, "seed": seed, "ignore_eos": True}
            ids: list[int] = []
            for draft, k in (("none", 0), ("model", K), ("ngram", K)):
                result = runtime.generate([5, 6, 7], **options, draft=draft, num_speculative_tokens=k, logprobs=1)
                ids = ids or result.token_ids
                assert result.token_ids == ids, draft
                assert result.text == tiny_tokenizer().decode(ids, skip_special_tokens=True)
                assert (result.stats.completion_tokens, [e.token_id for e in result.logprobs or []]) == (60, ids)
            bare += sum(token_id >= num_tokens for token_id in ids)
            banned = list(range(num_tokens, num_tokens + PADDING))
            if runtime.manifest.target.spec.vocab_size > num_tokens:
                result = runtime.generate([5, 6, 7], **options, banned_token_ids=banned, min_new_tokens=20)
                assert max(result.token_ids) < num_tokens
    assert (bare > 0) == (manifest_from_bundle(padded).target.spec.vocab_size > num_tokens)


def _chances(bundle: Path, prompt: list[int], num_tokens: int) -> dict[tuple[int, ...], float]:
    """Chances of the next ``num_tokens`` ids at temperature 0.8 and top-k 3, from the target's graph in numpy."""
    entry = manifest_from_bundle(bundle).target
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        longer: dict[tuple[int, ...], float] = {}
        for ids, chance in chances.items():
            logits = graph_logits(bundle / entry.graph, entry.spec, np.array([*prompt, *ids]), threads=1)[-1:]
            probs = filtered(logits, temperature=0.8, top_k=3)[0]
            longer |= {(*ids, int(token)): chance * float(probs[token]) for token in np.flatnonzero(probs)}
        chances = longer
    return chances


@pytest.mark.parametrize("rule", ["match", "block"])
def test_every_rule_draws_from_the_target_with_a_padded_vocabulary(padded: Path, rule: str) -> None:
    """The first token of the prefill, and two that a round verifies or draws: chi-square with many seeds."""
    prompt, num_draws, least = [5, 6, 7], 400, 5
    options: dict[str, Any] = {"temperature": 0.8, "top_k": 3, "rule": rule, "num_speculative_tokens": 2}
    chances = _chances(padded, prompt, 3)
    counts, accepted = dict.fromkeys(chances, 0), 0
    with specrt.load(padded, threads=1) as runtime:
        for seed in range(num_draws):
            result = runtime.generate(prompt, **options, max_new_tokens=4, ignore_eos=True, seed=seed)
            counts[tuple(result.token_ids[:3])] += 1  # a KeyError is an id that cannot be drawn
            accepted += result.stats.accepted
            if seed < 20:
                again = runtime.generate(prompt, **options, max_new_tokens=4, ignore_eos=True, seed=seed)
                assert again.token_ids == result.token_ids
    assert accepted > num_draws / 4
    common = [ids for ids, chance in chances.items() if chance * num_draws >= least]
    cells = [(counts[ids], chances[ids] * num_draws) for ids in common]
    cells.append((num_draws - sum(count for count, _ in cells), num_draws - sum(wanted for _, wanted in cells)))
    statistic = sum((count - wanted) ** 2 / wanted for count, wanted in cells)
    degrees = len(cells) - 1
    assert degrees >= 6
    assert statistic < degrees + 5 * (2 * degrees) ** 0.5, (statistic, degrees)
