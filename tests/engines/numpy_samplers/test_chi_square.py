"""Chi-square of what ``block`` commits, from logits and sampled uniforms; the classic bugs must fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import exp, factorial

import numpy as np
import pytest

from specrt.engines import numpy_samplers
from specrt.engines.interface import Array
from tests.engines.numpy_samplers.enumeration import Rule

VOCAB_SIZE = 6
K = 2
TEMPERATURE = 0.7
TOP_K = 4
NUM_DRAWS = [30_000, pytest.param(200_000, marks=pytest.mark.slow)]
NUM_WRONG_DRAWS = 6_000  # what fails with these fails with more
NORMAL_QUANTILE = 3.719  # of 1 - alpha, alpha = 1e-4
MIN_EXPECTED = 5


@dataclass(frozen=True)
class Tables:
    """Distributions by the last token, [V, V] f32: the target's, what ids are drafted from, what verifies them."""

    target: Array
    draft: Array
    given: Array


@cache
def logits() -> Array:
    """Of target and draft, by the last token. [2, V, V] f32"""
    rng = np.random.Generator(np.random.Philox(2))
    target = rng.normal(size=(VOCAB_SIZE, VOCAB_SIZE))
    return np.stack([target, target + rng.normal(size=target.shape)]).astype(np.float32)


def tables(given: Callable[[Array], Array] | None = None) -> Tables:
    """``given`` makes the draft's distributions that the rule is given from its logits; by default the true ones."""
    target, draft = (numpy_samplers.filtered(values, TEMPERATURE, TOP_K) for values in logits())
    return Tables(target, draft, draft if given is None else given(logits()[1]))


def picked(weights: Array, uniforms: Array) -> Array:
    """An id of each row by inverse CDF. [N, V], [N] -> [N]"""
    cumulated = np.cumsum(weights, axis=1, dtype=np.float64)
    ids: Array = np.sum(cumulated <= uniforms[:, None] * cumulated[:, -1:], axis=1)
    return ids


def committed(rule: Rule, by: Tables, num_draws: int) -> Array:
    """The first K + 1 tokens after token 0: a round's, then the target's own. [N, K + 1]"""
    rng = np.random.Generator(np.random.Philox(11))
    tokens = np.zeros((num_draws, K + 2), np.int64)  # with token 0 in front
    for i in range(K):
        tokens[:, i + 1] = picked(by.draft[tokens[:, i]], rng.random(num_draws))
    uniforms = rng.random((num_draws, K + 2), dtype=np.float32)
    lengths = np.empty(num_draws, np.int64)
    proposed = tokens[:, 1 : K + 1].copy()
    for drafted in np.unique(proposed, axis=0):
        contexts = np.array([0, *drafted])
        p, q = by.target[contexts], by.given[contexts[:-1]]
        for draw in np.flatnonzero((proposed == drafted).all(axis=1)):
            eta, chunk, within = uniforms[draw, :K], uniforms[draw, K], uniforms[draw, K + 1]
            lengths[draw], tokens[draw, lengths[draw] + 1] = rule(p, q, drafted, eta, (chunk, within))
    for i in range(K):
        own = picked(by.target[tokens[:, i + 1]], rng.random(num_draws))
        tokens[:, i + 2] = np.where(lengths <= i, own, tokens[:, i + 2])
    return tokens[:, 1:]


def is_target_s(tokens: Array, target: Array) -> bool:
    """Whether a chi-square test at alpha = 1e-4 lets the tokens pass as the target's."""
    places = np.indices((VOCAB_SIZE,) * (K + 1)).reshape(K + 1, -1)  # every sequence
    chances = target[0, places[0]].astype(np.float64)
    for before, after in pairwise(places):
        chances = chances * target[before, after]
    expected = len(tokens) * chances / chances.sum()
    observed = np.bincount(np.ravel_multi_index(tuple(tokens.T), (VOCAB_SIZE,) * (K + 1)), minlength=len(expected))
    if observed[expected == 0].any():
        return False
    rare = (expected > 0) & (expected < MIN_EXPECTED)
    common = expected >= MIN_EXPECTED
    expected = np.append(expected[common], expected[rare].sum() or 1)
    observed = np.append(observed[common], observed[rare].sum() if rare.any() else 1)
    statistic = np.sum((observed - expected) ** 2 / expected)
    return bool(statistic < critical_value(len(expected) - 1 - (not rare.any())))


def critical_value(degrees: int) -> float:
    """Of chi-square at alpha, after Wilson and Hilferty."""
    ninth = 2 / (9 * degrees)
    return float(degrees * (1 - ninth + NORMAL_QUANTILE * ninth**0.5) ** 3)


@pytest.mark.parametrize("degrees", [40, 64, 100])
def test_chi_square_exceeds_the_critical_value_once_in_ten_thousand(degrees: int) -> None:
    """For an even number of degrees the tail is that of a Poisson distribution."""
    half = critical_value(degrees) / 2
    tail = sum(exp(-half) * half**count / factorial(count) for count in range(degrees // 2))
    assert tail == pytest.approx(1e-4, rel=0.1)


@pytest.mark.parametrize("num_draws", NUM_DRAWS)
def test_what_is_committed_passes_as_the_target_s(num_draws: int) -> None:
    by = tables()
    assert is_target_s(committed(numpy_samplers.block, by, num_draws), by.target)


# --- what must fail ------------------------------------------------------------------------------------------------

Final = tuple[float, float]


def without_residual(rule: Rule) -> Rule:
    """After a rejection the target's own distribution is drawn from."""

    def wrong(p: Array, q: Array, drafted: Array, eta: Array, final: Final) -> tuple[int, int]:
        accepted, _ = rule(p, q, drafted, eta, final)
        return accepted, numpy_samplers.draw(p[accepted], *final)

    return wrong


def with_rows_off_by_one(rule: Rule) -> Rule:
    """Each drafted id is verified by the row after its own."""
    return lambda p, q, drafted, eta, final: rule(np.append(p[1:], p[-1:], axis=0), q, drafted, eta, final)


def dropping_unsure_ids(rule: Rule) -> Rule:
    """The last drafted id is not submitted when the draft gave it little."""

    def wrong(p: Array, q: Array, drafted: Array, eta: Array, final: Final) -> tuple[int, int]:
        k = K - (q[K - 1, drafted[K - 1]] < 0.4)
        return rule(p[: k + 1], q[:k], drafted[:k], eta[:k], final)

    return wrong


def block_that_breaks(p: Array, q: Array, drafted: Array, eta: Array, final: Final) -> tuple[int, int]:
    """The search for the accepted length ends at its first failure."""
    ids = drafted.tolist()
    hits = eta < numpy_samplers.block_chances(p, q, ids)
    accepted = int(np.argmin(np.append(hits, False)))
    if accepted == K:
        return accepted, numpy_samplers.draw(p[K], *final)
    prefix = numpy_samplers.block_prefixes(p, q, ids)[accepted]
    return accepted, numpy_samplers.draw(np.maximum(prefix * p[accepted] - q[accepted], 0), *final)


@pytest.mark.parametrize("make_wrong", [without_residual, with_rows_off_by_one, dropping_unsure_ids])
def test_a_wrong_rule_does_not_pass(make_wrong: Callable[[Rule], Rule]) -> None:
    by = tables()
    assert not is_target_s(committed(make_wrong(numpy_samplers.block), by, NUM_WRONG_DRAWS), by.target)


def test_block_with_a_break_at_the_first_failure_does_not_pass() -> None:
    by = tables()
    assert not is_target_s(committed(block_that_breaks, by, NUM_WRONG_DRAWS), by.target)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(lambda values: numpy_samplers.filtered(values, 1.0, TOP_K), id="at another temperature"),
        pytest.param(lambda values: numpy_samplers.softmax(values, TEMPERATURE), id="before top-k"),
    ],
)
def test_other_probabilities_than_ids_were_drafted_from_do_not_pass(given: Callable[[Array], Array]) -> None:
    by = tables(given)
    assert not is_target_s(committed(numpy_samplers.block, by, NUM_WRONG_DRAWS), by.target)


def test_as_few_draws_of_the_right_rule_pass() -> None:
    by = tables()
    assert is_target_s(committed(numpy_samplers.block, by, NUM_WRONG_DRAWS), by.target)
