"""Logits that tie, as in fp16: greedy text is the same for every K only if samplers take the first of equals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from specrt.engines.contract import ModelSpec
from specrt.engines.fake import FakeSampler
from specrt.engines.interface import Array
from specrt.runtime.settings import Settings
from tests.runtime.support.fakes import LoadSampler, pair_of
from tests.runtime.support.tables import hashed_logits

VOCAB_SIZE, NUM_TOKENS = 48, 60


def tied(prefix: Sequence[int]) -> Array:
    """Logits of three values only, so that several ids are the most likely in nearly every row."""
    return np.round(hashed_logits(4, VOCAB_SIZE, memory=3)(prefix) / 3)


def any_of_equals(seed: int) -> LoadSampler:
    rng = np.random.default_rng(seed)

    def load(spec: ModelSpec, name: str, vocab_size: int) -> FakeSampler:
        return FakeSampler(spec, name, vocab_size, ties=rng)

    return load


def texts(load: LoadSampler) -> list[list[int]]:
    """Without drafts, and with the target's own for several K."""
    pair = pair_of(tied, None, VOCAB_SIZE, load=load)
    settings = Settings(NUM_TOKENS, 3, draft="model")
    ways = [replace(settings, num_speculative_tokens=0, draft="none")]
    ways += [replace(settings, num_speculative_tokens=k) for k in (1, 3, 8)]
    return [pair.run(way).token_ids for way in ways]


def test_the_first_of_equals_gives_one_text_for_every_k() -> None:
    plain, *others = texts(FakeSampler)
    assert len(plain) == NUM_TOKENS
    assert others == [plain] * 3


@pytest.mark.parametrize("seed", [1, 2])
def test_any_of_equals_gives_others(seed: int) -> None:
    """The control: what TensorRT's and cuDNN's ArgMax permit would change the text."""
    plain, *others = texts(any_of_equals(seed))
    assert all(text != plain for text in others)
