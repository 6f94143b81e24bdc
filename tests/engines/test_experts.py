"""Distinct experts of a pass: the formula against draws, and what it adds to a pass in bytes."""

from __future__ import annotations

import numpy as np
import pytest

from specrt.engines.experts import Experts


def test_a_pass_of_one_token_reads_its_own_experts() -> None:
    experts = Experts(num_layers=3, num_experts=16, experts_per_token=2, bytes_per_expert=1000)
    assert experts.expected_distinct(1) == pytest.approx(2)
    assert experts.further_bytes(1) == 0
    assert experts.expected_distinct(10_000) == pytest.approx(16)
    assert experts.further_bytes(10_000) == 3 * 14 * 1000


@pytest.mark.parametrize(("count", "per_token"), [(8, 2), (64, 8), (4, 4)])
@pytest.mark.parametrize("num_tokens", [1, 2, 6])
def test_the_formula_is_the_mean_of_independent_draws(count: int, per_token: int, num_tokens: int) -> None:
    """Each token draws ``per_token`` different experts, all equally likely. 1,000 passes: 5 standard errors."""
    rng = np.random.default_rng(0)
    orders = rng.random((1000, num_tokens, count)).argsort(-1)[..., :per_token]
    distinct = np.array([len(set(draw.ravel().tolist())) for draw in orders])
    expected = Experts(1, count, per_token, 1).expected_distinct(num_tokens)
    assert abs(distinct.mean() - expected) <= 5 * distinct.std() / 1000**0.5 + 1e-9
    if num_tokens > 1 and per_token < count:  # not what tokens with experts of their own would read
        assert distinct.mean() < num_tokens * per_token - 0.02


@pytest.mark.parametrize("wrong", [(0, 8, 2, 1), (1, 8, 9, 1), (1, 8, 0, 1), (1, 8, 2, 0)])
def test_contradictions_are_refused(wrong: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="contradictory"):
        Experts(*wrong)
