"""A head in the loop, on fake engines that notice every wrong feature, id, row and rollback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrt.engines.contract import FEATURE_CACHE, LOGITS, ModelSpec
from specrt.engines.fake import FakeEngine, FakeHead, FakeSampler, Pairs, fake_spec, feature_of, hidden_of
from specrt.runtime.drafting.drafters import ModelDrafter
from specrt.runtime.drafting.head import HeadModel
from specrt.runtime.model import KVCachedModel
from specrt.runtime.sampling.draft_sampler import DraftSampler
from specrt.runtime.sampling.samplers import SamplerEngines
from specrt.runtime.settings import Settings
from specrt.runtime.slots import SlotModel
from specrt.runtime.target import Target
from tests.runtime.support.tables import hashed

VOCAB_SIZE, K = 64, 4
SPEC = replace(fake_spec(VOCAB_SIZE, 96, K, max_width=8), feature_size=1)
_next_after = hashed(3, VOCAB_SIZE)


def next_of(pairs: Pairs) -> int:
    return _next_after([int(2 * number) for pair in pairs for number in pair])


def expected_draft(tokens: Sequence[int], k: int) -> list[int]:
    """What the head drafts after ``tokens``, computed without any state."""
    pairs = [(feature_of(tokens[: i + 1]), token) for i, token in enumerate(tokens[1:])]
    drafted: list[int] = []
    for _ in range(k):
        drafted.append(next_of(pairs))
        pairs.append((hidden_of(pairs), drafted[-1]))
    return drafted


class Slot:
    """Target and head in one slot, for one text after another. ``min_width`` is the target's."""

    def __init__(self, min_width: int = 1) -> None:
        self._min_width = min_width
        spec = replace(SPEC, reads_features=True)
        self.head = HeadModel(FakeHead(spec, next_of), spec)
        engine = FakeEngine(SPEC, hashed(1, VOCAB_SIZE))
        self.target = self._slot(KVCachedModel(engine, SPEC, feature_memory=self.head.feature_memory), SPEC)
        self.target.model.feature_reader = self.head
        self.draft = self._slot(self.head, replace(spec, max_rows=1))
        self.tokens: list[int] = []

    def _slot(self, model: KVCachedModel, spec: ModelSpec) -> SlotModel:
        return SlotModel(model, SamplerEngines(lambda name: FakeSampler(spec, name)))

    def begin(self, prompt: Sequence[int], has_draft: bool) -> None:
        """A generation's prefill; without a draft the head is not asked at all."""
        self.target.begin(prompt, self._min_width)
        self.verifier = Target(self.target, Settings(), len(prompt))
        self.drafter: ModelDrafter | None = None
        if has_draft:
            self.draft.begin(prompt, 1)
            sampler = DraftSampler(self.draft, self.target, Settings(), len(prompt))
            self.drafter = ModelDrafter(self.head, sampler, VOCAB_SIZE)
        _, token = self.verifier.verify(prompt, ())
        self.tokens = [*prompt, token]
        if self.drafter is not None:
            self.drafter.prefill(self.tokens[:-1])

    def round(self, k: int, num_accepted: int, drafts: bool) -> None:
        """A round in which ``num_accepted`` of ``k`` ids are accepted: the head's, or others.

        Rows of features that are said to be stale hold none.
        """
        num_accepted = min(num_accepted, k)
        self.head.binding.host[FEATURE_CACHE][self.head.stale_rows()] = np.nan
        if drafts and self.drafter is not None:
            assert self.drafter.propose(self.tokens, k) == expected_draft(self.tokens, k)
        own = self.continuation(num_accepted)
        wrong = [(self.continuation(num_accepted + 1)[-1] + 1) % VOCAB_SIZE] * (k - num_accepted)
        accepted, token = self.verifier.verify(self.tokens, [*own, *wrong])
        assert accepted == num_accepted
        self.tokens += [*own, token]
        self.verifier.rollback(len(self.tokens))
        if self.drafter is not None:
            self.drafter.rollback(len(self.tokens))

    def continuation(self, count: int) -> list[int]:
        """The target's next ``count`` ids."""
        tokens = list(self.tokens)
        for _ in range(count):
            tokens.append(hashed(1, VOCAB_SIZE)(tokens))
        return tokens[len(self.tokens) :]


prompts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20)
rounds = st.lists(st.tuples(st.integers(0, K), st.integers(0, K), st.booleans()), max_size=5)
# (the shared prefix of the text before, as a share; what follows it; whether the head drafts; rounds)
texts = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 0.9, 1.0]), prompts, st.booleans(), rounds), min_size=1, max_size=4
)


@given(texts, st.sampled_from([1, 2]))
def test_every_draft_is_that_of_a_computation_from_nothing(texts: list[Any], min_width: int) -> None:
    """Over accepted and rejected drafts, drafts of others, rounds without any, and reused prefixes."""
    slot = Slot(min_width)
    for share, following, has_draft, steps in texts:
        prompt = [*slot.tokens[: int(share * len(slot.tokens))], *following][:40]
        slot.begin(prompt, has_draft)
        for k, num_accepted, drafts in steps:
            slot.round(k, num_accepted, drafts)


def test_a_reused_prefix_is_fed_once_but_for_its_last_pair() -> None:
    """Pair i depends on token i + 1, so of N tokens that are reused, N - 1 pairs are."""
    slot = Slot()
    slot.begin(list(range(1, 21)), has_draft=True)
    slot.round(K, 1, drafts=True)
    slot.begin([*range(1, 21), 40, 41, 42], has_draft=True)
    assert slot.target.model.kv_len == 23 and slot.head.kv_len == 22
    engine = slot.head.binding._owner  # type: ignore[attr-defined]
    engine.widths.clear()
    slot.begin([*range(1, 21), 40, 41, 50], has_draft=True)
    assert engine.widths == [1], "the pair of the new token 50, in place of 42"
    slot.round(K, 0, drafts=True)


def test_features_that_were_given_up_are_written_again() -> None:
    """The head read feature 21 long ago, and another token follows it: the target is fed token 21 again."""
    slot = Slot()
    slot.begin(list(range(1, 21)), has_draft=True)
    for _ in range(3):
        slot.round(K, 2, drafts=True)
    reused = slot.tokens[:22]
    slot.target.begin([*reused, 63, 62], 1)
    assert (slot.target.model.kv_len, slot.head.kv_len) == (21, 21), "pair 20, of token 21, is kept"
    slot.begin([*reused, 63, 62], has_draft=True)
    slot.round(K, 0, drafts=True)


def test_features_are_copied_only_where_the_head_has_not_read_them() -> None:
    slot, copied = Slot(), list[tuple[int, int]]()
    slot.begin(list(range(1, 21)), has_draft=True)
    take = slot.head.binding.take

    def noted(name: str, start: int, source: Any) -> None:
        copied.append((start, len(source)))
        take(name, start, source)

    slot.head.binding.take = noted  # type: ignore[method-assign]
    own = SPEC.max_width + SPEC.capacity
    for _ in range(3):
        slot.round(K, 2, drafts=True)
        assert copied == [(own, 1)] * (K - 1), "its own states, to the same row in each round"
        copied.clear()
    position = len(slot.tokens) - 4  # the last token's position is not fed, and the round before gave three features
    slot.round(K, 1, drafts=False)
    assert copied == [(SPEC.max_width + position, 3)]


def test_ids_without_draws_between_them_take_a_pass_each() -> None:
    """A grammar's forced ids: each pair reads the hidden state of the one before it."""
    slot = Slot()
    slot.begin([5, 6, 7], has_draft=True)
    pairs = [(feature_of(slot.tokens[: i + 1]), token) for i, token in enumerate(slot.tokens[1:])]
    slot.head.feed([*slot.head.missing(slot.tokens), 9, 8], 1)
    for token in (9, 8):
        pairs.append((hidden_of(pairs), token))
    assert int(slot.head.read(LOGITS)[0][0].argmax()) == next_of(pairs)


def test_a_text_of_one_token_has_no_pair() -> None:
    slot = Slot()
    slot.begin([5], has_draft=True)
    assert slot.drafter is not None and slot.drafter.propose([5], 3) == []
    assert slot.drafter.propose(slot.tokens, 3) == expected_draft(slot.tokens, 3)


def test_a_pair_without_a_feature_is_refused() -> None:
    slot = Slot()
    with pytest.raises(ValueError, match="expected features for all of them"):
        slot.head.feed([3], 1)
    slot.begin([5, 6, 7], has_draft=True)
    slot.drafter.propose(slot.tokens, 2)  # type: ignore[union-attr]
    slot.head.rollback(len(slot.tokens) - 1)
    with pytest.raises(ValueError, match="expected features for all of them"):
        slot.head.feed([3], 1)
    slot.head.rollback(0)
    with pytest.raises(ValueError, match="for 2 rows"):
        slot.head.feed([*slot.tokens[1:], 3], 2)
