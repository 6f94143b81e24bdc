"""Acceptance by position: what is seen wins over what was assumed, and newer rounds over older ones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrt.runtime.drafting.acceptance import Acceptance, expected_tokens

RATES = st.lists(st.floats(0, 1), max_size=8)


@given(RATES)
def test_expected_tokens_are_those_of_the_enumeration(rates: list[float]) -> None:
    """Each outcome: the first n accepted, the next not (or all of K)."""
    for k in range(len(rates) + 1):
        total = 0.0
        for outcome in itertools.product((0, 1), repeat=k):
            chance = float(np.prod([rate if hit else 1 - rate for rate, hit in zip(rates, outcome, strict=False)]))
            total += chance * (1 + [*outcome, 0].index(0))
        assert expected_tokens(rates)[k] == pytest.approx(total)


def test_the_prior_holds_at_first_and_its_last_rate_beyond() -> None:
    assert Acceptance(4, [0.9, 0.6]).rates() == pytest.approx([0.9, 0.6, 0.6, 0.6])


@pytest.mark.parametrize("true", [[0.95] * 4, [0.1] * 4, [0.9, 0.7, 0.5, 0.3]])
def test_estimates_come_to_the_text_s_own(true: list[float]) -> None:
    rng = np.random.default_rng(0)
    learned, seen = Acceptance(4, [0.5], memory=0.99), []
    for _ in range(600):
        hits = rng.random(4) < true
        learned.observe(4, 4 if hits.all() else int(hits.argmin()))
        seen.append(learned.rates())
    assert np.mean(seen[200:], axis=0) == pytest.approx(true, abs=0.12)


def test_the_newest_rounds_count_most() -> None:
    changed = Acceptance(2, [0.5])
    for accepted in [2] * 40 + [0] * 20:
        changed.observe(2, accepted)
    assert changed.rates()[0] < 0.3


def test_positions_that_are_never_reached_follow_the_others() -> None:
    good, bad = Acceptance(4, [0.5]), Acceptance(4, [0.5])
    for _ in range(12):
        good.observe(1, 1)
        bad.observe(1, 0)
    assert good.rates()[3] > 0.7 and bad.rates()[3] < 0.3


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=50), st.floats(0.01, 0.99))
def test_rates_are_probabilities(rounds: list[tuple[int, int]], prior: float) -> None:
    learned = Acceptance(4, [prior])
    for drafted, accepted in rounds:
        learned.observe(drafted, min(accepted, drafted))
        assert all(0 < rate < 1 for rate in learned.rates())
