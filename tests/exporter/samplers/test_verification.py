"""The samplers that verify drafted ids decide as their references do, to the bit where arithmetic is exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from specrt.engines import numpy_samplers
from specrt.engines.contract import LOGITS, NUM_ACCEPTED, TOKENS
from specrt.engines.interface import Array
from specrt.engines.samplers import BLOCK, CHUNK, MATCH, MATCH_SAMPLED, NUM_UNIFORMS, PROBS, UNIFORMS, WITHIN
from tests.exporter.samplers.samplers_on_ort import (
    BELOW_ONE,
    MAX_K,
    VOCAB_SIZES,
    Drafted,
    dyadic,
    fed,
    halving,
    sampler,
    seeds,
    verified,
)

NEAR_EDGE = 1e-5
KINDS = ["any", "equal", "one-hot p", "one-hot p at x", "one-hot q", "disjoint"]
vocab_sizes = st.sampled_from(VOCAB_SIZES)
kinds = st.lists(st.sampled_from(KINDS), max_size=MAX_K)


def one_hot(place: int, vocab_size: int) -> Array:
    row = np.zeros(vocab_size, np.float32)
    row[place] = 1
    return row


def rows_of(kind: str, p: Array, q: Array, rng: np.random.Generator) -> tuple[Array, Array, int]:
    """Rows p and q turned into ones of ``kind``, and an id drawn from q."""
    vocab_size = len(p)
    if kind == "one-hot q":
        q = one_hot(int(rng.integers(vocab_size)), vocab_size)
    x = int(rng.choice(np.flatnonzero(q)))
    if kind == "equal":
        p = q
    if kind == "one-hot p":
        p = one_hot(int(rng.integers(vocab_size)), vocab_size)
    if kind == "one-hot p at x":
        p = one_hot(x, vocab_size)
    if kind == "disjoint" and not q.all():
        p = one_hot(int(rng.choice(np.flatnonzero(q == 0))), vocab_size)
    return p, q, x


def random_uniforms(rng: np.random.Generator, count: int, on_grid: bool) -> Array:
    """Of a grid, so that some are on edges, or of any fp32; some are 0, or 1, to which fp64 below 1 may round."""
    uniforms = rng.integers(0, 1024, count) / 1024 if on_grid else rng.random(count)
    special = rng.choice([0.0, BELOW_ONE, 1.0], count)
    return np.where(rng.random(count) < 0.1, special, uniforms).astype(np.float32)


def drafted_case(seed: int, vocab_size: int, kinds: list[str], on_grid: bool) -> Drafted:
    """Rows in multiples of 1/64; with q in powers of two all that ``block`` computes of three ids is exact."""
    rng = np.random.default_rng(seed)
    rows = [rows_of(kind, dyadic(rng, vocab_size), halving(rng, vocab_size), rng) for kind in kinds]
    p = np.stack([*(row[0] for row in rows), dyadic(rng, vocab_size)])
    q = np.stack([row[1] for row in rows]) if rows else np.zeros((0, vocab_size), np.float32)
    uniforms = random_uniforms(rng, len(kinds) + 2, on_grid)
    chunk, within = uniforms[-2:].tolist()
    return Drafted(p, q, np.array([row[2] for row in rows], np.int64), uniforms[:-2], (chunk, within))


def check(case: Drafted, k: int, seed: int) -> None:
    outputs = sampler(BLOCK, case.p.shape[1], k=k).run(case.inputs(np.random.default_rng(seed)))
    assert verified(outputs) == numpy_samplers.block(*case.for_reference)


# --- block ---------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(seeds, vocab_sizes, st.lists(st.sampled_from(KINDS), max_size=3), st.sampled_from([3, MAX_K]))
def test_exact_cases_agree_at_every_uniform_edges_included(
    seed: int, vocab_size: int, kinds: list[str], k: int
) -> None:
    check(drafted_case(seed, vocab_size, kinds, on_grid=True), k, seed)


@settings(max_examples=150)
@given(seeds, vocab_sizes, kinds)
def test_dyadic_cases_of_any_length_agree(seed: int, vocab_size: int, kinds: list[str]) -> None:
    check(drafted_case(seed, vocab_size, kinds, on_grid=False), MAX_K, seed)


@pytest.mark.parametrize("k", range(1, MAX_K + 1))
def test_a_sampler_serves_every_row_count_up_to_its_own(k: int) -> None:
    for seed in range(4):
        for num_drafted in range(k + 1):
            check(drafted_case(seed, 7, ["any"] * num_drafted, on_grid=False), k, seed)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES[1:])
@pytest.mark.parametrize(
    ("log_shift", "is_rounding"), [(-25, True), (-24, True), (-23, False), (-20, False), (-12, False)]
)
def test_a_small_residual_is_drawn_from_unless_it_is_rounding(
    vocab_size: int, log_shift: int, is_rounding: bool
) -> None:
    """p is q, except for a power of two that goes from the drafted id to the last one."""
    q = np.zeros((1, vocab_size), np.float32)
    q[0, [0, 1, -1]] = 0.5, 0.25, 0.25
    p = np.vstack([q, q])
    p[0, [0, -1]] += -(2.0**log_shift), 2.0**log_shift
    for uniform in (0.1, 0.4, 0.7, 0.9):
        case = Drafted(p, q, np.array([0]), np.array([BELOW_ONE], np.float32), (0.0, uniform))
        check(case, MAX_K, 0)
        accepted, token = numpy_samplers.block(*case.for_reference)
        assert accepted == 0
        assert token == (numpy_samplers.draw(p[0], 0.0, uniform) if is_rounding else vocab_size - 1)


def margin(case: Drafted) -> float:
    """How far the uniforms are from where a decision turns, and the sums from where rounding rules; in fp64."""
    p, q = case.p.astype(np.float64), case.q.astype(np.float64)
    distances = [np.inf]
    prefixes = [1.0]
    for i, (x, eta) in enumerate(zip(case.drafted, case.eta, strict=True), 1):
        ratio = p[i - 1, x] / q[i - 1, x]
        prefixes.append(min(prefixes[-1] * ratio, 1.0))
        chance = prefixes[-1]
        if i < len(q):
            missing = np.maximum(prefixes[-1] * p[i] - q[i], 0).sum()
            rest = missing + 1 - prefixes[-1]
            distances.append(rest or np.inf)
            chance = missing / rest if rest else 1.0
        distances.append(abs(eta - chance))
    accepted, _ = numpy_samplers.block(*case.for_reference)
    weights = p[accepted]
    if accepted < len(q):
        residual = np.maximum(prefixes[accepted] * p[accepted] - q[accepted], 0)
        distances.append(residual.sum() or np.inf)
        weights = residual if residual.any() else weights
    return float(min(*distances, distance_to_draw(weights, case.final)))


def distance_to_draw(weights: Array, final: tuple[float, float]) -> float:
    """From the uniforms to the edges of the chunks and of the ids in the one that is drawn."""
    size = numpy_samplers.chunk_size(len(weights))
    chunks = np.pad(weights.astype(np.float64), (0, -len(weights) % size)).reshape(-1, size)
    edges = np.cumsum(chunks.sum(axis=1)) / chunks.sum()
    chunk = min(int((edges <= final[0]).sum()), len(edges) - 1)
    inner = np.cumsum(chunks[chunk]) / (chunks[chunk].sum() or 1)
    inside = [np.abs(cut[:-1] - u) for cut, u in zip((edges, inner), final, strict=True)]
    return float(min(*(part.min() if part.size else np.inf for part in inside), np.inf))


@settings(max_examples=150)
@given(
    seeds,
    vocab_sizes,
    st.integers(0, MAX_K),
    st.sampled_from([0.3, 1.0, 3.0]),
    st.sampled_from([0, 3, 40]),
    st.sampled_from([0.0, 0.3, 2.0]),
)
def test_cases_from_logits_agree_away_from_the_edges(
    seed: int, vocab_size: int, k: int, scale: float, top_k: int, noise: float
) -> None:
    rng = np.random.default_rng(seed)
    target = rng.normal(0, scale, (k + 1, vocab_size)).astype(np.float32)
    draft = (target[:k] + noise * rng.normal(size=(k, vocab_size))).astype(np.float32)
    p = numpy_samplers.filtered(target, 0.8, top_k)
    q = numpy_samplers.filtered(draft, 0.8, top_k) if k else np.zeros((0, vocab_size), np.float32)
    drafted = np.array([numpy_samplers.draw(row, rng.random(), rng.random()) for row in q], np.int64)
    chunk, within = random_uniforms(rng, 2, on_grid=False).tolist()
    case = Drafted(p, q, drafted, random_uniforms(rng, k, on_grid=False), (chunk, within))
    assume(margin(case) > NEAR_EDGE)
    check(case, MAX_K, seed)


# --- match ---------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(seeds, vocab_sizes, st.integers(0, MAX_K), st.sampled_from([0.3, 3.0]))
def test_match_takes_the_first_most_likely_ids(seed: int, vocab_size: int, k: int, scale: float) -> None:
    """Logits are rounded to integers, so that many tie."""
    rng = np.random.default_rng(seed)
    logits = np.round(rng.normal(0, scale, (k + 1, vocab_size))).astype(np.float32)
    tokens = numpy_samplers.greedy(logits)
    drafted = np.where(rng.random(k) < 0.8, tokens[:k], rng.integers(0, vocab_size, k))
    outputs = sampler(MATCH, vocab_size).run({LOGITS: logits, **fed(drafted, rng, vocab_size)})
    np.testing.assert_array_equal(outputs[TOKENS], tokens)
    assert outputs[NUM_ACCEPTED].tolist() == [numpy_samplers.match(tokens, drafted)]


@settings(max_examples=150)
@given(seeds, vocab_sizes, st.integers(0, MAX_K), st.booleans())
def test_match_sampled_draws_each_row_with_its_own_uniforms(seed: int, vocab_size: int, k: int, on_grid: bool) -> None:
    rng = np.random.default_rng(seed)
    probs = np.stack([dyadic(rng, vocab_size) for _ in range(k + 1)])
    uniforms = random_uniforms(rng, (k + 1) * NUM_UNIFORMS, on_grid).reshape(-1, NUM_UNIFORMS)
    tokens = np.array([numpy_samplers.draw(row, u[CHUNK], u[WITHIN]) for row, u in zip(probs, uniforms, strict=True)])
    drafted = np.where(rng.random(k) < 0.8, tokens[:k], rng.integers(0, vocab_size, k))
    given = fed(drafted, rng, vocab_size)
    outputs = sampler(MATCH_SAMPLED, vocab_size).run({PROBS: probs, UNIFORMS: uniforms, **given})
    np.testing.assert_array_equal(outputs[TOKENS], tokens)
    assert outputs[NUM_ACCEPTED].tolist() == [numpy_samplers.match(tokens, drafted)]
    assert (probs[np.arange(k + 1), outputs[TOKENS]] > 0).all()


@pytest.mark.parametrize("weight", [1e-45, 1e-42, 1e-39])
@pytest.mark.parametrize("uniform", [0.0, 0.9, BELOW_ONE])
def test_a_chunk_of_denormal_weight_gives_the_id_that_has_it(weight: float, uniform: float) -> None:
    probs, uniforms = np.zeros((1, 1031), np.float32), np.zeros((1, NUM_UNIFORMS), np.float32)
    probs[0, [5, 600]] = weight, 1
    uniforms[0, WITHIN] = uniform
    given = fed(np.zeros(0, np.int64), np.random.default_rng(0), 1031)
    assert sampler(MATCH_SAMPLED, 1031).run({PROBS: probs, UNIFORMS: uniforms, **given})[TOKENS].tolist() == [5]


@settings(max_examples=60)
@given(seeds, vocab_sizes, st.integers(0, MAX_K), st.sampled_from([0.3, 3.0]))
def test_match_sampled_from_logits_agrees_away_from_the_edges(seed: int, vocab_size: int, k: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    probs = numpy_samplers.softmax(rng.normal(0, scale, (k + 1, vocab_size)).astype(np.float32), 1.0)
    uniforms = rng.random((k + 1, NUM_UNIFORMS), dtype=np.float32)
    pairs = list(zip(probs, uniforms, strict=True))
    assume(min(distance_to_draw(row, (u[CHUNK], u[WITHIN])) for row, u in pairs) > NEAR_EDGE)
    outputs = sampler(MATCH_SAMPLED, vocab_size).run(
        {PROBS: probs, UNIFORMS: uniforms, **fed(rng.integers(0, vocab_size, k), rng, vocab_size)}
    )
    assert outputs[TOKENS].tolist() == [numpy_samplers.draw(row, u[CHUNK], u[WITHIN]) for row, u in pairs]
