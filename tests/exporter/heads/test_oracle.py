"""The head's module against an independent implementation that reads the original files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specrt.exporter.heads.config import HeadVariant
from specrt.exporter.heads.files import build_head, head_from_folder
from specrt.exporter.heads.module import Head
from tests.exporter.heads.making import NUM_LAYERS, SIZE, TAPS, head_config, random_head, save_head, texts
from tests.exporter.heads.oracle import Faults, Oracle, reference_rounds
from tests.exporter.heads.rounds import CachedHead, module_rounds

K = 4
PLAIN = HeadVariant(TAPS)
CASES = {
    "official": ("official", "llama", 150, PLAIN),
    "official, whole vocabulary": ("official", "llama", 320, PLAIN),
    "SpecForge": ("SpecForge", "llama", 150, HeadVariant((3, 4, 6), "each", False, True)),
    "AngelSlim": ("AngelSlim", "llama", 150, PLAIN),
    "speculators, llama": ("speculators", "llama", 150, HeadVariant((1, 3, 6), "whole", True, False)),
    "speculators, qwen3": ("speculators", "qwen3", 150, HeadVariant((0, 4, 7), "each", True, True)),
}


def load(folder: Path, target: Any) -> Head:
    loaded = head_from_folder(folder, NUM_LAYERS, SIZE, target.config.vocab_size)
    return build_head(loaded.config, loaded.tensors, target.get_input_embeddings().weight)


STARTS = (3, 11, 20, 29)  # the number of pairs before a chain


def logits_and_chains(head: Head, target: Any) -> tuple[torch.Tensor, list[list[int]]]:
    """Over the target's ids at every position of a text, and 40 drafted ids from each of ``STARTS``."""
    ids, _, states = texts(target, 1, 30, seed=7)
    features = head.fuse(torch.cat([states[tap][0] for tap in head.config.variant.taps], -1))
    drafted = [CachedHead(head).chain(ids[0, : n + 1].tolist(), features[:n], 40) for n in STARTS]
    once = CachedHead(head)
    logits = torch.full((29, head.config.vocab_size), -torch.inf)
    normalized, _ = head(ids[:, 1:], features[None, :-1], torch.arange(29)[None], once._attend)
    logits[:, torch.arange(head.config.draft_vocab_size) + head.d2t] = head.logits(normalized[0])
    return logits, drafted


def oracle_logits_and_chains(
    folder: Path, target: Any, faults: Faults | None = None
) -> tuple[torch.Tensor, list[list[int]]]:
    ids, _, states = texts(target, 1, 30, seed=7)
    oracle = Oracle(folder, NUM_LAYERS, target.get_input_embeddings().weight.detach(), faults)
    features = oracle.features([state[0] for state in states])[:-1]
    shift = oracle.faults.token_shift
    logits, _ = oracle.step(ids[0, shift : shift + 29], features)
    return logits, [oracle.chain(ids[0, : n + 1].tolist(), features[:n], 40)[0] for n in STARTS]


@pytest.mark.parametrize("case", CASES)
def test_a_head_of_every_layout_computes_what_its_trainers_code_does(case: str, target: Any, tmp_path: Path) -> None:
    layout, kind, draft_vocab_size, variant = CASES[case]
    original = random_head(head_config(kind, draft_vocab_size, variant), target)
    folder = save_head(tmp_path / "head", layout, original)
    head = load(folder, target)
    assert head.config.variant == variant
    logits, drafted = logits_and_chains(head, target)
    expected, chains = oracle_logits_and_chains(folder, target)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert drafted == chains
    assert len({token for chain in drafted for token in chain}) > 5


@pytest.mark.parametrize("fault", [Faults(tap_offset=1), Faults(token_shift=0), Faults(d2t_is_table=True)])
def test_the_comparison_finds_a_planted_fault(fault: Faults, target: Any, tmp_path: Path) -> None:
    folder = save_head(tmp_path / "head", "SpecForge", random_head(head_config(), target))
    logits, drafted = logits_and_chains(load(folder, target), target)
    wrong, chains = oracle_logits_and_chains(folder, target, fault)
    assert not torch.allclose(logits, wrong, rtol=1e-2, atol=1e-2)
    assert drafted != chains


@pytest.mark.slow  # of random heads: test_export.py
def test_rounds_with_a_trained_head_are_the_references(target: Any, trained: Any, tmp_path: Path) -> None:
    """Also the negative control: own rows that are kept after a round change what is drafted."""
    folder = save_head(tmp_path / "head", "official", trained("plain", head_config(draft_vocab_size=60), 200))
    head, kept = load(folder, target), Faults(keeps_own_rows=True)
    prompts = [texts(target, 1, 12, seed=seed)[0][0].tolist() for seed in (0, 2, 9)]
    rounds = [reference_rounds(target, folder, prompt, K, 40) for prompt in prompts]
    assert [module_rounds(target, head, prompt, K, 40) for prompt in prompts] == rounds
    for of_prompt in rounds:
        assert sum(accepted for _, accepted in of_prompt) >= 5
        assert sum(accepted + 1 for _, accepted in of_prompt) == 39  # the prefill gives one
    assert [reference_rounds(target, folder, prompt, K, 40, kept) for prompt in prompts] != rounds
