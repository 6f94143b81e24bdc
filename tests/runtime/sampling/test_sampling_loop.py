"""Sampling in the loop: with a seed, what is drafted changes no token; without, ``block`` keeps the distribution.

PLAIN (``decode``) is written by hand in float64, without speculation. Processing and filters are on in half the
cases.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from specrt.engines.fake import fake_spec
from specrt.runtime.settings import Settings
from tests.runtime.support.fakes import ALL_K, POISON, PROMPT, Engine, Pair, Script, cache_of, figures, pair_of
from tests.runtime.support.plain import NearEdge, decode
from tests.runtime.support.tables import hashed_logits, noisy

VOCAB_SIZE = 32
TABLE = hashed_logits(1, VOCAB_SIZE)
DRAFT = noisy(TABLE, 2, VOCAB_SIZE, 0.125)

PENALTIES: dict[str, Any] = {
    "repetition_penalty": 21 / 16,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {3: 1.5, 9: -2.0},
    "banned_token_ids": (6, 12),
    "min_new_tokens": 9,
    "ending_ids": (3, 17),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "bare": {},
    "filters": {"top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "penalties": PENALTIES,
    "both": {"top_k": 12, "top_p": 0.9, **PENALTIES},
}


def settings_for(temperature: float, variant: str, **other: Any) -> Settings:
    return Settings(**{"max_new_tokens": 16, "temperature": temperature, "seed": 5, **VARIANTS[variant], **other})


each_temperature = pytest.mark.parametrize("temperature", [0, 0.7, 1.0])
each_variant = pytest.mark.parametrize("variant", VARIANTS)


# --- match: ids are a function of seed and target ------------------------------------------------------------------


@each_temperature
@each_variant
@pytest.mark.parametrize("drafter", ["none", "model", "smaller", "larger", "wrong"])
def test_no_draft_changes_a_token(temperature: float, variant: str, drafter: str) -> None:
    """Drafts of another vocabulary or distribution; K = 1 .. 8, one after another in one slot."""
    size = VOCAB_SIZE + {"smaller": -5, "larger": 5}.get(drafter, 0)
    draft = noisy(TABLE, 2, size, 0.125) if drafter != "wrong" else lambda prefix: np.roll(TABLE(prefix), 1)
    pair = pair_of(TABLE, draft, VOCAB_SIZE, size)
    expected = decode(TABLE, settings_for(temperature, variant), PROMPT)
    assert len(expected) >= 10
    drafted = accepted = 0
    for k in (0,) if drafter == "none" else ALL_K:
        kind = "none" if drafter == "none" else "model"
        done = pair.run(settings_for(temperature, variant, num_speculative_tokens=k, draft=kind))
        assert done.token_ids == expected
        drafted, accepted = drafted + done.stats.drafted, accepted + done.stats.accepted
    assert (drafted > 0) == (drafter != "none")
    assert accepted > drafted / 8 or drafter not in ("model", "larger")


@each_temperature
@pytest.mark.parametrize("rule", ["match", "block"])
@pytest.mark.parametrize("k", ALL_K)
def test_a_draft_s_cache_lacks_the_newest_token_and_one_more_after_full_acceptance(
    temperature: float, rule: str, k: int
) -> None:
    """What was drafted last is never fed. The target's cache lacks the newest token."""
    pair = pair_of(TABLE, DRAFT, VOCAB_SIZE)
    settings = settings_for(temperature, "bare", rule=rule, draft="model", num_speculative_tokens=k, max_new_tokens=40)
    missing: list[tuple[int, int]] = []
    lengths: list[int] = []

    def between(tokens: list[int]) -> None:
        lengths.append(len(tokens))
        missing.append((len(tokens) - pair.target.model.kv_len, len(tokens) - pair.draft.model.kv_len))

    pair.run(settings, between=between)
    accepted = [after - before - 1 for before, after in pairwise(lengths)]
    is_full_width = [lengths[-1] - before > k for before in lengths[:-1]]  # the last ones draft less
    expected = [(1, 2 if n == k else 1) for n, is_full in zip(accepted, is_full_width, strict=True) if is_full]
    assert missing[1 : len(expected) + 1] == expected
    assert {of_target for of_target, _ in missing} == {1}


@each_temperature
@each_variant
def test_no_n_gram_draft_changes_a_token(temperature: float, variant: str) -> None:
    """A table that remembers one token, so that n-grams come again."""
    peaked = hashed_logits(4, VOCAB_SIZE, memory=1)
    pair = pair_of(peaked, None, VOCAB_SIZE)
    settings = settings_for(temperature / 2, variant, max_new_tokens=60, draft="ngram", ending_ids=())
    expected = decode(peaked, settings, PROMPT)
    runs = [pair.run(replace(settings, num_speculative_tokens=k)) for k in ALL_K]
    assert [done.token_ids for done in runs] == [expected] * len(ALL_K)
    assert sum(done.stats.drafted for done in runs) > 0


@each_temperature
@each_variant
def test_a_target_that_drafts_for_itself_is_always_right(temperature: float, variant: str) -> None:
    """Both draw with the numbers of the position, so all is accepted: the draft's cache is right, or this decays."""
    pair = pair_of(TABLE, None, VOCAB_SIZE)
    others = {"max_new_tokens": 40, "seed": 2**64 - 1, "ending_ids": ()}
    expected = decode(TABLE, settings_for(temperature, variant, **others), PROMPT)
    for k in ALL_K:
        done = pair.run(settings_for(temperature, variant, num_speculative_tokens=k, draft="model", **others))
        assert done.token_ids == expected
        assert done.stats.draft_acceptance_rate == 1.0


@each_temperature
@each_variant
@pytest.mark.parametrize("k", ALL_K)
def test_exactly_the_tokens_before_the_wrong_one_are_accepted(temperature: float, variant: str, k: int) -> None:
    """The plain continuation, corrupted at a = 0 .. K: five rounds of a + 1 tokens. Rows see their own penalties."""
    pair = pair_of(TABLE, DRAFT, VOCAB_SIZE)
    settings = settings_for(temperature, variant, num_speculative_tokens=k, ending_ids=())
    for wrong in range(k + 1):
        count = 1 + 5 * (wrong + 1)
        expected = decode(TABLE, replace(settings, max_new_tokens=count + k), PROMPT)
        script = Script([*PROMPT, *expected], wrong)
        done = pair.run(replace(settings, max_new_tokens=count + k), drafter=script)
        assert done.token_ids == expected
        assert [len(ids) for ids in done.rounds[:6]] == [1] + 5 * [wrong + 1]


@each_temperature
@pytest.mark.parametrize("k", ALL_K)
@pytest.mark.parametrize("variant", ["penalties", "both"])
def test_min_new_tokens_ends_in_the_middle_of_a_round(temperature: float, k: int, variant: str) -> None:
    """An id that is likely to end the text as soon as it may, in whichever row that is."""
    pair = pair_of(TABLE, DRAFT, VOCAB_SIZE)
    for min_new_tokens in range(1, 10):
        others = {"min_new_tokens": min_new_tokens, "logit_bias": {3: 20.0}, "repetition_penalty": 1.0}
        settings = settings_for(temperature, variant, num_speculative_tokens=k, **others)
        expected = decode(TABLE, settings, PROMPT)
        assert expected.index(3) == min_new_tokens
        for wrong in {0, k // 2, k}:
            done = pair.run(settings, drafter=Script([*PROMPT, *expected], wrong))
            assert (done.token_ids, done.finish_reason) == (expected, "stop")


# --- every case at once --------------------------------------------------------------------------------------------


@st.composite
def any_settings(draw: st.DrawFn) -> Settings:
    some = st.lists(st.integers(0, 7), max_size=2, unique=True)
    sixteenths = st.integers(-16, 16).map(lambda n: n / 16)
    return Settings(
        max_new_tokens=draw(st.integers(0, 30)),
        num_speculative_tokens=draw(st.integers(1, 8)),
        draft=draw(st.sampled_from(["none", "model", "ngram"])),
        temperature=draw(st.sampled_from([0, 0.5, 1.0, 3.0])),
        top_k=draw(st.sampled_from([0, 0, 2, 5])),
        top_p=draw(st.sampled_from([1, 1, 0.5, 0.9])),
        min_p=draw(st.sampled_from([0, 0, 0.01, 0.2])),
        seed=draw(st.integers(0, 99)),
        reproducible=draw(st.booleans()),
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 2.0, 4.0])),
        presence_penalty=draw(sixteenths),
        frequency_penalty=draw(sixteenths),
        logit_bias=draw(st.dictionaries(st.integers(0, 7), sixteenths, max_size=2)),
        banned_token_ids=draw(some),
        ending_ids=tuple(draw(some)),
        min_new_tokens=draw(st.integers(0, 12)),
    )


def check_caches(tokens: list[int], pair: Pair) -> None:
    """Both hold exactly the committed tokens but the newest (the draft's those that it was fed); stale is poisoned."""
    assert pair.target.model.kv_len == len(tokens) - 1
    assert pair.draft.model.kv_len <= len(tokens) - 1
    for slot in (pair.target, pair.draft):
        cache = cache_of(slot.model)
        assert cache[: slot.model.kv_len].tolist() == tokens[: slot.model.kv_len]
        cache[slot.model.kv_len :] = POISON


@hypothesis_settings(max_examples=150)
@given(st.integers(0, 999), st.lists(any_settings(), min_size=1, max_size=3), st.data())
def test_the_output_is_plain_and_the_caches_hold_what_is_committed(
    seed: int, several: list[Settings], data: st.DataObject
) -> None:
    """Up to three generations in one slot, of prompts that share a beginning."""
    size, draft_size = data.draw(st.integers(8, 12)), data.draw(st.integers(8, 14))
    table = hashed_logits(seed, size, data.draw(st.integers(0, 3)))
    context, draft_context = data.draw(st.integers(2, 48)), data.draw(st.integers(1, 60))
    pair = Pair(
        Engine(fake_spec(size, context), table),
        Engine(fake_spec(draft_size, draft_context), noisy(table, seed + 1, draft_size, data.draw(st.floats(0, 1)))),
    )
    for settings in several:
        prompt = [1, 2, 3, 1, 2][: data.draw(st.integers(0, 5))]
        prompt += data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=20))
        try:
            expected = decode(table, settings, prompt, context)
        except NearEdge:
            reject()
        pair.draft.model.rollback(0)  # what it held of another sequence, where this one is not drafted
        done = pair.run(settings, prompt, between=lambda tokens: check_caches(tokens, pair))
        assert done.token_ids == expected
        assert done.stats.completion_tokens == len(done.token_ids)
        check_widths(pair, settings)


def check_widths(pair: Pair, settings: Settings) -> None:
    if settings.reproducible:
        assert min([*pair.engine.widths, *pair.engine.rows], default=2) >= 2
    pair.engine.widths.clear()
    pair.engine.rows.clear()


# --- block ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["bare", "filters", "penalties", "both"])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_draft_of_the_same_distribution_is_accepted_whole(variant: str, k: int) -> None:
    """p = q to the last bit, so that u q < p for every u < 1: rows of the draft's probabilities are where they belong.

    Each row's penalties count what was drafted before it.
    """
    pair = pair_of(TABLE, None, VOCAB_SIZE)
    for seed in range(3):
        settings = settings_for(1.0, variant, rule="block", draft="model", num_speculative_tokens=k, seed=seed)
        done = pair.run(replace(settings, max_new_tokens=60, ending_ids=()))
        assert done.stats.draft_acceptance_rate == 1.0
        assert len(done.token_ids) == 60


@pytest.mark.parametrize("reproducible", [False, True])
def test_the_same_seed_gives_the_same_text_after_any_generation(reproducible: bool) -> None:
    settings = settings_for(
        1.0, "both", rule="block", draft="model", num_speculative_tokens=4, reproducible=reproducible
    )
    alone = pair_of(TABLE, DRAFT, VOCAB_SIZE).run(settings)
    pair = pair_of(TABLE, DRAFT, VOCAB_SIZE)
    bare = replace(settings, repetition_penalty=1, presence_penalty=0, frequency_penalty=0, logit_bias={})
    bare = replace(bare, banned_token_ids=(), ending_ids=())
    for other in (bare, replace(settings, seed=9), replace(settings, rule="match"), replace(settings, temperature=0)):
        pair.run(other, [1, 2, 3])
        again = pair.run(settings)
        assert (again.rounds, figures(again.stats)) == (alone.rounds, figures(alone.stats))


def test_a_close_draft_is_accepted_more_than_a_wrong_one() -> None:
    settings = settings_for(1.0, "bare", rule="block", draft="model", num_speculative_tokens=5, max_new_tokens=30)

    def accepted(pair: Pair) -> int:
        return sum(pair.run(replace(settings, seed=seed)).stats.accepted for seed in range(15))

    close = pair_of(TABLE, noisy(TABLE, 2, VOCAB_SIZE, 0.5), VOCAB_SIZE)
    far = pair_of(TABLE, hashed_logits(77, VOCAB_SIZE), VOCAB_SIZE)
    assert accepted(close) > 2 * accepted(far)
