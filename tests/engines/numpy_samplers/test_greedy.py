"""The numpy reference in parts: inverse CDF in two levels, ``match``, and ``block`` row by row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrt.engines import numpy_samplers
from specrt.engines.interface import Array

BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))
VOCAB_SIZES = [1, 3, 64, 1000, 1024, 1025, 1031, 2053, 4096]  # 1031 and 2053 are prime: padded
uniforms = st.one_of(st.sampled_from([0.0, 0.5, BELOW_ONE]), st.floats(0, BELOW_ONE, width=32))
each_vocab_size = pytest.mark.parametrize("vocab_size", VOCAB_SIZES)


def dyadic(rng: np.random.Generator, vocab_size: int, units: int = 64) -> Array:
    """A distribution on at most ``units`` ids, in multiples of 1 / units. [V] f32"""
    counts = np.bincount(rng.integers(0, vocab_size, units), minlength=vocab_size)
    return (counts / units).astype(np.float32)


def searched(weights: Array, uniform: float) -> int:
    """Inverse CDF by numpy."""
    cumulated = np.cumsum(weights, dtype=np.float64)
    return int(np.searchsorted(cumulated, uniform * cumulated[-1], side="right"))


# --- draw ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab_size", "size"),
    [(1, 1), (3, 3), (64, 64), (1000, 1000), (1024, 1024), (1025, 205), (1031, 512), (2053, 512), (4096, 1024)],
)
def test_chunks_have_the_size_of_a_divisor_where_there_is_one(vocab_size: int, size: int) -> None:
    assert numpy_samplers.chunk_size(vocab_size) == size


@given(st.integers(1, 200_000))
def test_a_chunk_is_neither_long_nor_tiny(vocab_size: int) -> None:
    size = numpy_samplers.chunk_size(vocab_size)
    assert min(vocab_size, 64) <= size <= 1024
    assert size == 512 or vocab_size % size == 0


@given(st.integers(0, 2**32), st.sampled_from(VOCAB_SIZES), uniforms, uniforms)
def test_drawing_is_a_search_in_the_cumulated_weights_of_chunks_and_ids(
    seed: int, vocab_size: int, chunk_uniform: float, within_uniform: float
) -> None:
    weights = dyadic(np.random.default_rng(seed), vocab_size)
    size = numpy_samplers.chunk_size(vocab_size)
    starts = range(0, vocab_size, size)
    start = starts[searched(np.array([weights[s : s + size].sum() for s in starts]), chunk_uniform)]
    expected = start + searched(weights[start : start + size], within_uniform)
    assert numpy_samplers.draw(weights, chunk_uniform, within_uniform) == expected


@each_vocab_size
def test_each_id_is_drawn_by_as_many_pairs_of_uniforms_as_it_has_weight(vocab_size: int) -> None:
    """Ids of equal weight, over the middles of a grid so fine that every edge is between its cells."""
    weights = np.zeros(vocab_size, np.float32)
    ids = np.linspace(0, vocab_size - 1, min(vocab_size, 8)).astype(int)
    weights[ids] = 1 / len(ids)
    size = numpy_samplers.chunk_size(vocab_size)
    in_chunk = np.bincount(ids // size)
    num_cells = len(ids) * int(np.lcm.reduce(in_chunk[in_chunk > 0]))
    grid = [(i + 0.5) / num_cells for i in range(num_cells)]
    drawn = np.bincount([numpy_samplers.draw(weights, a, b) for a in grid for b in grid], minlength=vocab_size)
    np.testing.assert_array_equal(drawn, weights * len(grid) ** 2)


@given(
    st.integers(0, 2**32),
    st.sampled_from(VOCAB_SIZES),
    st.integers(1, 40),
    st.floats(1e-6, 1e6),
    uniforms,
    uniforms,
)
def test_only_ids_of_positive_weight_are_drawn(
    seed: int, vocab_size: int, num_positive: int, scale: float, chunk_uniform: float, within_uniform: float
) -> None:
    rng = np.random.default_rng(seed)
    weights = np.zeros(vocab_size, np.float32)
    weights[rng.integers(0, vocab_size, num_positive)] = scale * rng.exponential(size=num_positive) ** 8 + 1e-30
    assert weights[numpy_samplers.draw(weights, chunk_uniform, within_uniform)] > 0


@pytest.mark.parametrize("weight", [1e-45, 1e-42, 1e-39])
@pytest.mark.parametrize("uniform", [0.0, 0.9, BELOW_ONE])
def test_a_chunk_of_denormal_weight_gives_the_id_that_has_it(weight: float, uniform: float) -> None:
    """Its total times the largest fp32 below 1 rounds to the total again."""
    weights = np.zeros(1031, np.float32)
    weights[[5, 600]] = weight, 1
    assert numpy_samplers.draw(weights, 0.0, uniform) == 5


@each_vocab_size
@pytest.mark.parametrize("uniform", [0.0, 0.5, BELOW_ONE, 1.0])
@pytest.mark.parametrize("place", [0, -1])
def test_an_id_alone_is_drawn_by_every_uniform(vocab_size: int, uniform: float, place: int) -> None:
    """Even by 1, to which a float64 below 1 may round."""
    weights = np.zeros(vocab_size, np.float32)
    weights[place] = 0.3
    assert numpy_samplers.draw(weights, uniform, uniform) == place % vocab_size


def test_the_tail_of_a_large_vocabulary_is_not_lost() -> None:
    """Every chunk of 151,936 ids of equal weight is drawn, and the very last id."""
    vocab_size = 151_936
    weights = np.full(vocab_size, 1 / vocab_size, np.float32)
    assert numpy_samplers.draw(weights, 0.0, 0.0) == 0
    assert numpy_samplers.draw(weights, BELOW_ONE, BELOW_ONE) == vocab_size - 1
    size = numpy_samplers.chunk_size(vocab_size)
    grid = np.arange(vocab_size // size)
    middles = (grid + 0.5) / len(grid)
    assert [numpy_samplers.draw(weights, u, 0.0) // size for u in middles] == grid.tolist()


# --- match ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2), max_size=8), st.integers(0, 2**32))
def test_match_counts_the_leading_hits(drafted: list[int], seed: int) -> None:
    tokens = np.random.default_rng(seed).integers(0, 3, len(drafted) + 1)
    count = 0
    while count < len(drafted) and tokens[count] == drafted[count]:
        count += 1
    assert numpy_samplers.match(tokens, np.array(drafted, np.int64)) == count


def test_greedy_takes_the_first_of_equal_maxima() -> None:
    logits = np.array([[1, 3, 3, 2], [5, 5, 5, 5], [-np.inf, -np.inf, -2, -2]], np.float32)
    assert numpy_samplers.greedy(logits).tolist() == [1, 0, 2]


# --- block ---------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.sampled_from([2, 3, 7, 1025]))
def test_one_drafted_id_is_accepted_with_chance_p_over_q(seed: int, vocab_size: int) -> None:
    """For every eta, edges included: eta q and p / q are exact where it could matter."""
    rng = np.random.default_rng(seed)
    p = np.stack([dyadic(rng, vocab_size), dyadic(rng, vocab_size)])
    q = dyadic(rng, vocab_size)[None]
    drafted = np.array([numpy_samplers.draw(q[0], rng.random(), rng.random())])
    final = rng.random(), rng.random()
    x = drafted[0]
    residual = np.maximum(p[0] - q[0], 0)
    for step in range(65):
        eta = np.array([min(step / 64, BELOW_ONE)], np.float32)
        accepted = int(eta[0] * q[0, x] < p[0, x])
        weights = p[1] if accepted else residual if residual.any() else p[0]
        expected = accepted, numpy_samplers.draw(weights, *final)
        assert numpy_samplers.block(p, q, drafted, eta, final) == expected


def test_an_eta_at_the_edge_rejects_and_one_below_accepts() -> None:
    """The chance of x = 0 is p / q = 1 / 2."""
    p, q = np.array([[0.25, 0.75], [0, 1]], np.float32), np.array([[0.5, 0.5]], np.float32)
    below = np.nextafter(np.float32(0.5), np.float32(0))
    assert numpy_samplers.block(p, q, np.array([0]), np.array([0.5], np.float32), (0.5, 0.5)) == (0, 1)
    assert numpy_samplers.block(p, q, np.array([0]), np.array([below], np.float32), (0.5, 0.5)) == (1, 1)


def test_an_id_of_target_probability_0_is_rejected_even_at_eta_0() -> None:
    p, q = np.array([[0, 1], [1, 0]], np.float32), np.array([[0.5, 0.5]], np.float32)
    assert numpy_samplers.block(p, q, np.array([0]), np.zeros(1, np.float32), (0.5, 0.5)) == (0, 1)


@pytest.mark.parametrize("eta", [0.0, 0.5, BELOW_ONE])
def test_equal_rows_accept_everything(eta: float) -> None:
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(50), 6).astype(np.float32)
    drafted = np.array([numpy_samplers.draw(row, 0.5, 0.5) for row in p[:5]])
    assert numpy_samplers.block_chances(p, p[:5], drafted).tolist() == [1] * 5  # 0 / 0 accepts
    accepted, token = numpy_samplers.block(p, p[:5], drafted, np.full(5, eta, np.float32), (0.5, 0.3))
    assert (accepted, token) == (5, numpy_samplers.draw(p[5], 0.5, 0.3))


def test_a_residual_that_is_only_rounding_is_not_drawn_from() -> None:
    """Row 0 of p is that of q except for two ulps at the drafted id, which eta just rejects."""
    q = np.array([[0.5, 0.25, 0.25]], np.float32)
    p = np.array([[0.5 - 2**-24, 0.25, 0.25 + 2**-25], [0, 0, 1]], np.float32)
    eta = np.array([BELOW_ONE], np.float32)
    assert numpy_samplers.block(p, q, np.array([0]), eta, (0.5, 0.1)) == (0, 0)
    assert numpy_samplers.block(p, q, np.array([0]), eta, (0.5, 0.6)) == (0, 1)


def test_block_goes_on_after_a_failure() -> None:
    """x_1 alone would be rejected by any eta_1 >= 0, but x_2 makes up for it: P_1 = 1/2, P_2 = 1."""
    p = np.array([[0.25, 0.75], [1, 0], [1, 0]], np.float32)
    q = np.array([[0.5, 0.5], [0.5, 0.5]], np.float32)
    drafted, final = np.array([0, 0]), (0.5, 0.5)
    assert numpy_samplers.block(p, q, drafted, np.array([BELOW_ONE, 0.5], np.float32), final) == (2, 0)
    assert numpy_samplers.block(p, q, drafted, np.array([0.5, BELOW_ONE], np.float32), final) == (2, 0)


def test_nothing_drafted_draws_from_the_target() -> None:
    p = np.array([[0.25, 0.75]], np.float32)
    nothing = np.zeros(0, np.int64)
    for uniform, token in ((0.2, 0), (0.3, 1)):
        assert numpy_samplers.block(
            p, np.zeros((0, 2), np.float32), nothing, np.zeros(0, np.float32), (0.0, uniform)
        ) == (0, token)
