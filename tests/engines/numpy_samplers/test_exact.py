"""Exact distributions: committed tokens, continued from the target, have the target's distribution."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from functools import partial

import numpy as np
import pytest

from specrt.engines import numpy_samplers
from tests.engines.numpy_samplers.enumeration import (
    Distribution,
    Keys,
    Model,
    Pair,
    Row,
    Tokens,
    Uniforms,
    bias,
    by_position,
    by_round,
    common,
    exact_distribution,
    random_model,
)

TOLERANCE = 1e-12
LONG = 99  # a memory longer than any sequence here
Step = Callable[[Tokens, Uniforms], Tokens]

each_seed = pytest.mark.parametrize("seed", range(3))


def random_pair(seed: int, k: int, vocab_size: int = 3, memory: int = LONG) -> Pair:
    return Pair(random_model(seed, vocab_size, memory), random_model(seed + 1000, vocab_size, memory), k)


def one_hot(model: Model) -> Model:
    """Always the most likely id of ``model``: a greedy draft."""

    def row(prefix: Tokens) -> Row:
        weights = model(prefix).weights
        return Row(tuple(Fraction(i == weights.index(max(weights))) for i in range(len(weights))))

    return row


def bias_of(distribution: Distribution, pair: Pair, rounds: int) -> float:
    """Of ``rounds`` rounds that are continued from the target to one token more than they can commit."""
    return bias(distribution, pair.target, rounds * (pair.k + 1) + 1)


def twice(step: Step) -> Callable[[Uniforms], Tokens]:
    """The second round continues from what the first committed, with the same uniforms where keys are the same."""

    def program(uniforms: Uniforms) -> Tokens:
        first = step((), uniforms)
        return first + step(first, uniforms)

    return program


def then_fresh(step: Step, memory: int) -> Distribution:
    """The distribution of two rounds whose uniforms are independent: the second depends on the last ``memory`` tokens
    only.
    """
    second: dict[Tokens, Distribution] = {}
    distribution: Distribution = defaultdict(Fraction)
    for first, chance in exact_distribution(partial(step, ())).items():
        context = first[-memory:]
        if context not in second:
            second[context] = exact_distribution(partial(step, context))
        for tokens, weight in second[context].items():
            distribution[first + tokens] += chance * weight
    return distribution


def of_a_round(pair: Pair) -> Distribution:
    return exact_distribution(lambda uniforms: pair.sampled((), uniforms, by_round))


# --- one round -----------------------------------------------------------------------------------------------------


@each_seed
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_round_has_the_target_s_distribution(k: int, seed: int) -> None:
    pair = random_pair(seed, k)
    assert bias_of(of_a_round(pair), pair, 1) <= TOLERANCE


@each_seed
@pytest.mark.parametrize(("k", "keys"), [(1, by_position), (2, by_position), (1, common), (2, common), (3, common)])
def test_a_round_of_match_has_the_target_s_distribution(k: int, keys: Keys, seed: int) -> None:
    """The draft draws with its own uniforms, and with the target's."""
    pair = random_pair(seed, k)
    assert bias_of(exact_distribution(lambda uniforms: pair.matched((), uniforms, keys)), pair, 1) <= TOLERANCE


# --- two rounds ----------------------------------------------------------------------------------------------------


def test_two_rounds_of_three_drafted_ids_have_the_target_s_distribution() -> None:
    pair = random_pair(5, 3, memory=2)
    distribution = then_fresh(lambda prefix, uniforms: pair.sampled(prefix, uniforms, by_round), memory=2)
    assert {len(tokens) for tokens in distribution} == set(range(2, 9))
    assert bias_of(distribution, pair, 2) <= TOLERANCE


@each_seed
def test_two_rounds_of_block_with_keys_by_round_have_the_target_s_distribution(seed: int) -> None:
    pair = random_pair(seed, 2, memory=1)
    step: Step = lambda prefix, uniforms: pair.sampled(prefix, uniforms, by_round)  # noqa: E731
    assert bias_of(exact_distribution(twice(step), ends=False), pair, 2) <= TOLERANCE


@each_seed
def test_two_rounds_of_block_are_biased_by_uniforms_of_positions(seed: int) -> None:
    """Its decision looks at ids beyond those it accepts, and their positions are verified again."""
    pair = random_pair(seed, 2, memory=1)
    step: Step = lambda prefix, uniforms: pair.sampled(prefix, uniforms, by_position)  # noqa: E731
    assert 0.002 < bias_of(exact_distribution(twice(step), ends=False), pair, 2) < 0.1


def matched_twice(pair: Pair, keys: Keys) -> Distribution:
    """Two rounds of ``match``, each path of which commits what the target alone draws with the same uniforms."""
    alone = Pair(pair.target, pair.draft, 0)

    def program(uniforms: Uniforms) -> Tokens:
        tokens = twice(lambda prefix, given: pair.matched(prefix, given, keys))(uniforms)
        plain: Tokens = ()
        while len(plain) < len(tokens):
            plain += alone.matched(plain, uniforms, keys)
        assert plain == tokens
        return tokens

    return exact_distribution(program, ends=False)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("k", "vocab_size", "keys"), [(2, 3, common), (3, 2, common), (2, 2, by_position)])
def test_two_rounds_of_match_have_the_target_s_distribution(k: int, vocab_size: int, keys: Keys, seed: int) -> None:
    pair = random_pair(seed, k, vocab_size, memory=2)
    assert bias_of(matched_twice(pair, keys), pair, 2) <= TOLERANCE


def test_two_rounds_of_match_with_three_greedily_drafted_ids_have_the_target_s_distribution() -> None:
    target = random_model(8, 3, memory=1)
    pair = Pair(target, one_hot(target), 3)
    distribution = matched_twice(pair, by_position)
    assert {len(tokens) for tokens in distribution} == set(range(2, 9))
    assert bias_of(distribution, pair, 2) <= TOLERANCE


# --- how much is accepted ------------------------------------------------------------------------------------------


def accepted(distribution: Distribution) -> Distribution:
    """The distribution of n."""
    counts: Distribution = defaultdict(Fraction)
    for tokens, chance in distribution.items():
        counts[(len(tokens) - 1,)] += chance
    return counts


def mean(distribution: Distribution) -> Fraction:
    return sum((chance * n for (n,), chance in accepted(distribution).items()), Fraction(0))


def mean_token_by_token(pair: Pair, prefix: Tokens = ()) -> Fraction:
    """Accepted ids of a round that accepts each with min(1, p / q) until the first rejection (arXiv 2211.17192)."""
    if len(prefix) == pair.k:
        return Fraction(0)
    both = map(min, pair.target(prefix).weights, pair.draft(prefix).weights)
    return sum((chance * (1 + mean_token_by_token(pair, (*prefix, x))) for x, chance in enumerate(both)), Fraction(0))


def test_the_paper_s_toy_case() -> None:
    third = Fraction(1, 3)
    pair = Pair(lambda prefix: Row((third, 2 * third)), lambda prefix: Row((2 * third, third)), 2)
    distribution = of_a_round(pair)
    assert (mean(distribution), mean_token_by_token(pair)) == (Fraction(11, 9), Fraction(10, 9))
    assert bias_of(distribution, pair, 1) <= TOLERANCE


@each_seed
def test_the_chances_of_block_are_those_of_the_paper(seed: int) -> None:
    """To rounding, at every drafted sequence; a sum of them with the wrong sign or row would be far off."""
    pair = random_pair(seed, 3)

    def program(uniforms: Uniforms) -> Tokens:
        verified = pair.propose((), uniforms, by_round)
        chances = numpy_samplers.block_chances(*verified.fp32, verified.drafted)
        np.testing.assert_allclose(chances, [float(edge) for edge in verified.edges], atol=1e-6)
        prefixes = numpy_samplers.block_prefixes(*verified.fp32, verified.drafted)
        np.testing.assert_allclose(prefixes, [float(prefix) for prefix in verified.prefixes], atol=1e-6)
        return verified.drafted

    assert len(exact_distribution(program, ends=False)) > 8


@each_seed
@pytest.mark.parametrize("k", [1, 2, 3])
def test_block_accepts_more_than_token_by_token_unless_one_id_is_drafted(k: int, seed: int) -> None:
    pair = random_pair(seed, k, memory=1)
    least, accepts = mean_token_by_token(pair), mean(of_a_round(pair))
    assert least == accepts if k == 1 else least < accepts


@each_seed
def test_of_a_greedy_draft_block_accepts_what_token_by_token_does(seed: int) -> None:
    target = random_model(seed, 3, LONG)
    pair = Pair(target, one_hot(random_model(seed + 50, 3, LONG)), 3)
    assert mean(of_a_round(pair)) == mean_token_by_token(pair)


def test_a_draft_that_is_the_target_is_always_accepted() -> None:
    target = random_model(3, 3, LONG)
    assert accepted(of_a_round(Pair(target, target, 3))) == {(3,): 1}


def test_a_drafted_id_of_target_probability_0_is_never_accepted() -> None:
    zero, half = Fraction(0), Fraction(1, 2)
    pair = Pair(lambda prefix: Row((half, half, zero)), lambda prefix: Row((zero, zero, 2 * half)), 3)
    distribution = of_a_round(pair)
    assert accepted(distribution) == {(0,): 1}
    assert bias_of(distribution, pair, 1) <= TOLERANCE
