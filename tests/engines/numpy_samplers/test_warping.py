"""Penalties and filters against transformers' processors, and log-probabilities against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specrt.engines import numpy_samplers
from specrt.engines.interface import Array

NEAR_EDGE = 1e-5
VOCAB_SIZES = [1, 2, 7, 50, 320, 1500]
seeds = st.integers(0, 2**32)
temperatures = st.sampled_from([0.2, 0.7, 1.0, 1.7])


def random_logits(rng: np.random.Generator, rows: int, vocab_size: int, scale: float = 3.0) -> Array:
    """Without ties in a row."""
    logits = rng.normal(0, scale, (rows, vocab_size)).astype(np.float32)
    assume(all(len(np.unique(row)) == vocab_size for row in logits))
    return logits


# --- penalties -----------------------------------------------------------------------------------------------------

NEUTRAL: dict[str, Any] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def counts(ids: Array, vocab_size: int) -> Array:
    return np.bincount(ids, minlength=vocab_size).astype(np.float32)


def penalized(logits: Array, drafted: Array, **changed: Any) -> Array:
    zeros = np.zeros(logits.shape[1], np.float32)
    given: dict[str, Any] = dict.fromkeys(("context_counts", "output_counts", "logit_bias"), zeros)
    given["ending_limit"] = np.full_like(zeros, np.inf)
    return numpy_samplers.penalize(logits, drafted, **(given | NEUTRAL | {"num_unending_rows": 0} | changed))


@given(seeds, st.sampled_from([5, 40]), st.integers(0, 8), st.sampled_from([0.5, 1.0, 1.3, 2.0]))
def test_repetition_is_penalized_as_in_transformers_after_each_row_s_own_prefix(
    seed: int, vocab_size: int, k: int, penalty: float
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (k + 1, vocab_size)).astype(np.float32)
    logits[:, 0] = 0
    context, drafted = rng.integers(0, vocab_size, rng.integers(1, 20)), rng.integers(0, vocab_size, k)
    processed = penalized(logits, drafted, context_counts=counts(context, vocab_size), repetition_penalty=penalty)
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    for row in range(k + 1):
        prefix = torch.tensor(np.concatenate([context, drafted[:row]]))[None]
        expected = processor(prefix, torch.tensor(logits[row : row + 1]))
        np.testing.assert_allclose(processed[row], expected[0].numpy(), rtol=1e-6)


@given(seeds, st.integers(0, 8), st.floats(-2, 2, width=32), st.floats(-2, 2, width=32))
def test_presence_and_frequency_count_the_output_before_each_row(
    seed: int, k: int, presence: float, frequency: float
) -> None:
    """As OpenAI defines them; the prompt does not count."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (k + 1, 9)).astype(np.float32)
    prompt, output, drafted = rng.integers(0, 9, 5), rng.integers(0, 9, rng.integers(0, 6)), rng.integers(0, 9, k)
    processed = penalized(
        logits,
        drafted,
        context_counts=counts(np.concatenate([prompt, output]), 9),
        output_counts=counts(output, 9),
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    for row in range(k + 1):
        prefix = [*output.tolist(), *drafted[:row].tolist()]
        for token in range(9):
            count = prefix.count(token)
            expected = logits[row, token] - count * frequency - (count > 0) * presence
            assert processed[row, token] == pytest.approx(expected, abs=2e-6)


def test_nothing_asked_changes_nothing() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 9)).astype(np.float32)
    seen = counts(rng.integers(0, 9, 30), 9)
    processed = penalized(logits, np.array([1, 1, 2]), context_counts=seen, output_counts=seen)
    np.testing.assert_array_equal(processed, logits)


def test_biases_are_added_first_and_endings_forbidden_in_the_first_rows_only() -> None:
    """The bias turns a negative logit positive, so that repetition divides it."""
    logits = np.full((3, 2), -1, np.float32)
    bias, ending = np.array([3, 0], np.float32), np.array([np.inf, -np.inf], np.float32)
    processed = penalized(
        logits,
        np.array([1, 1]),
        context_counts=np.array([1, 0], np.float32),
        logit_bias=bias,
        ending_limit=ending,
        num_unending_rows=2,
        repetition_penalty=2.0,
    )
    assert processed.tolist() == [[1, -np.inf], [1, -np.inf], [1, -2]]


# --- filters -------------------------------------------------------------------------------------------------------


def warped(logits: Array, temperature: float, top_k: int, top_p: float, min_p: float) -> Array:
    """By transformers' warpers, in the order of its ``generate``. [R, V] f32"""
    chain = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        chain.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        chain.append(MinPLogitsWarper(min_p))
    no_ids: Any = None
    probs: Array = torch.softmax(chain(no_ids, torch.tensor(logits)), dim=-1).numpy()
    return probs


def distance_to_edges(logits: Array, temperature: float, top_k: int, top_p: float, min_p: float) -> float:
    """How far the nearest cumulated mass is from ``top_p``, and the nearest ratio to the maximum from ``min_p``."""
    distance = np.inf
    for row in logits.astype(np.float64) / temperature:
        weights = np.exp(np.sort(row)[::-1] - row.max())
        distance = min(distance, float(np.abs(weights - min_p).min()) if min_p else np.inf)
        weights = weights[: top_k or None]
        distance = min(
            distance, float(np.abs(np.cumsum(weights) / weights.sum() - top_p).min()) if top_p < 1 else np.inf
        )
    return distance


@given(
    seeds,
    st.sampled_from(VOCAB_SIZES),
    temperatures,
    st.sampled_from([0, 1, 2, 5, 50, 5000]),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 1.0]),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_filters_keep_what_transformers_keep(
    seed: int, vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = random_logits(np.random.default_rng(seed), 3, vocab_size)
    top_k_there = min(top_k, vocab_size)
    is_one = min_p == 1  # the maximum itself is then at the edge
    assume(distance_to_edges(logits, temperature, top_k_there, top_p, 0 if is_one else min_p) > NEAR_EDGE)
    probs = numpy_samplers.filtered(logits, temperature, top_k, top_p, min_p)
    expected = warped(logits, temperature, top_k, top_p, min_p)
    np.testing.assert_array_equal(probs > 0, expected > 0)
    np.testing.assert_allclose(probs, expected, atol=2e-6, rtol=0)


@given(seeds, st.sampled_from(VOCAB_SIZES), temperatures)
def test_without_filters_it_is_the_softmax(seed: int, vocab_size: int, temperature: float) -> None:
    logits = random_logits(np.random.default_rng(seed), 3, vocab_size)
    probs = numpy_samplers.softmax(logits, temperature)
    np.testing.assert_array_equal(numpy_samplers.filtered(logits, temperature), probs)
    np.testing.assert_allclose(probs, torch.softmax(torch.tensor(logits) / temperature, -1).numpy(), atol=2e-6, rtol=0)
    assert probs.dtype == np.float32


@given(seeds, st.sampled_from(VOCAB_SIZES), temperatures)
@pytest.mark.parametrize("limit", [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_the_tightest_limits_keep_the_maximum_alone(
    limit: dict[str, Any], seed: int, vocab_size: int, temperature: float
) -> None:
    logits = random_logits(np.random.default_rng(seed), 3, vocab_size)
    expected = np.eye(vocab_size)[logits.argmax(axis=-1)]
    np.testing.assert_array_equal(numpy_samplers.filtered(logits, temperature, **limit), expected)


@pytest.mark.parametrize(
    ("limit", "num_kept"),
    [
        ({"top_k": 1}, 2),
        ({"top_k": 2}, 2),
        ({"top_k": 3}, 5),
        ({"top_k": 5}, 5),
        ({"top_k": 6}, 6),
        ({"top_k": 7}, 7),
        ({"top_k": 8}, 7),
        ({"top_p": 0.1}, 2),
        ({"top_p": 0.49}, 2),
        ({"top_p": 0.6}, 5),
        ({"top_p": 0.95}, 6),
        ({"min_p": 0.49}, 5),
        ({"min_p": 0.51}, 2),
        ({"top_k": 3, "top_p": 0.56}, 2),
        ({"top_k": 3, "top_p": 0.58}, 5),
    ],
)
def test_ids_tied_with_the_last_one_kept_are_kept(limit: dict[str, Any], num_kept: int) -> None:
    """Weights 4 4 2 2 2 1 0.5, not in this order: probabilities 0.258, 0.129, 0.065, 0.032."""
    weights = np.array([[2, 4, 0.5, 2, 4, 1, 2]], np.float32)
    logits = np.log(weights)
    kept = np.flatnonzero(numpy_samplers.filtered(logits, 1.0, **limit)[0])
    assert kept.tolist() == sorted(np.argsort(-weights[0], kind="stable")[:num_kept].tolist())


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.99])
def test_a_nucleus_of_most_of_a_large_vocabulary_holds_its_mass(top_p: float) -> None:
    """As many ids as in fp64, or one more or less: each has seven millionths of the mass here."""
    logits = np.random.default_rng(0).normal(0, 0.02, (1, 151_936)).astype(np.float32)
    weights = np.exp(np.sort(logits[0].astype(np.float64)))[::-1]
    expected = int((np.cumsum(weights) < top_p * weights.sum()).sum()) + 1
    assert abs(np.count_nonzero(numpy_samplers.filtered(logits, 1.0, 0, top_p)) - expected) <= 1


def test_a_banned_id_stays_banned() -> None:
    logits = np.array([[1, -np.inf, 0.5, -np.inf]], np.float32)
    for limits in ({}, {"top_k": 3}, {"top_p": 0.999999}, {"min_p": 0.01}):
        assert np.flatnonzero(numpy_samplers.filtered(logits, 0.7, **limits)[0]).tolist() == [0, 2]


# --- log-probabilities ---------------------------------------------------------------------------------------------


@given(seeds, st.sampled_from(VOCAB_SIZES))
def test_log_probabilities_are_those_of_torch(seed: int, vocab_size: int) -> None:
    rng = np.random.default_rng(seed)
    logits = random_logits(rng, 4, vocab_size)
    num_top, chosen = min(20, vocab_size), rng.integers(0, vocab_size, 4)
    of_chosen, of_top, top = numpy_samplers.logprobs(logits, chosen, num_top)
    logs = torch.log_softmax(torch.tensor(logits), -1)
    np.testing.assert_allclose(of_chosen, logs[torch.arange(4), torch.tensor(chosen)].numpy(), atol=5e-6)
    np.testing.assert_allclose(of_top, logs.topk(num_top).values.numpy(), atol=5e-6)
    np.testing.assert_allclose(np.take_along_axis(logs.numpy(), top, -1), of_top, atol=5e-6)


def test_equally_likely_ids_are_listed_in_their_order() -> None:
    logits = np.array([[1, 2, 1, 2, 1]], np.float32)
    assert numpy_samplers.logprobs(logits, np.array([0]), 4)[2].tolist() == [[1, 3, 0, 2]]
