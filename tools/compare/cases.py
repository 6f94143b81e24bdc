"""Seeded inputs of every sampler, with ties, and what the reference in numpy makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from specrt.engines import numpy_samplers
from specrt.engines.contract import INPUT_IDS, LOGITS, NUM_ACCEPTED, ROW_INDICES, ROWS, TOKENS, WIDTH, Contract
from specrt.engines.interface import Array
from specrt.engines.samplers import (
    ACCEPT,
    BLOCK,
    CHOSEN_IDS,
    CHUNK,
    CONTEXT_COUNTS,
    DRAFT_PROBS,
    ENDING_LIMIT,
    FILTER,
    FILTER_WIDE,
    FREQUENCY_PENALTY,
    LOGIT_BIAS,
    LOGPROBS,
    MATCH,
    MATCH_SAMPLED,
    MAX_TOP_LOGPROBS,
    MIN_P,
    NUCLEUS,
    NUCLEUS_IS_LARGER,
    NUM_UNENDING_ROWS,
    NUM_UNIFORMS,
    OUTPUT_COUNTS,
    PENALTIES,
    PRESENCE_PENALTY,
    PROBS,
    PROCESSED_LOGITS,
    REPETITION_PENALTY,
    SOFTMAX,
    TEMPERATURE,
    THRESHOLD,
    TOKEN_LOGPROBS,
    TOP_IDS,
    TOP_K,
    TOP_LOGPROBS,
    TOP_P,
    UNIFORMS,
    WITHIN,
)

Feed = dict[str, Array]
# How far an output may be from numpy's; those without a row are ids and counts, which must be equal.
TOLERANCES = {PROBS: 2e-6, PROCESSED_LOGITS: 1e-5, TOKEN_LOGPROBS: 2e-5, TOP_LOGPROBS: 2e-5}
NUM_CASES = 8


@dataclass(frozen=True)
class Case:
    """Inputs of a pass by name, and the outputs that are defined for them."""

    feed: Feed
    expected: Feed


def cases_of(name: str, contract: Contract, num_cases: int = NUM_CASES) -> Iterator[Case]:
    """Cases of sampler ``name``, from one row to as many as ``contract`` has."""
    make, limits = _MAKERS[name], contract.limits
    for number in range(num_cases):
        rng = np.random.default_rng(number)
        rows = min(1 + number % limits[ROWS], limits[WIDTH])
        yield make(rng, rows, _columns(contract))


def expected_of(name: str, contract: Contract, feed: Mapping[str, Array]) -> Feed:
    """What numpy makes of the inputs of a case."""
    for case in cases_of(name, contract):
        if case.feed.keys() == feed.keys() and all(np.array_equal(case.feed[key], feed[key]) for key in feed):
            return case.expected
    raise ValueError(f"{name}: these inputs are of no case")


def _columns(contract: Contract) -> int:
    name = PROBS if contract.inputs[0].name == PROBS else LOGITS
    return int(next(tensor.shape[-1] for tensor in contract.inputs if tensor.name == name))


def _tied(rng: np.random.Generator, rows: int, vocab: int) -> Array:
    """Logits in steps of a quarter, so that the largest one often occurs more than once; some ids are banned."""
    logits = (np.round(rng.normal(0, 2, (rows, vocab)) * 4) / 4).astype(np.float32)
    logits[rng.random((rows, vocab)) < 0.05] = -np.inf
    logits[np.arange(rows), rng.integers(0, vocab, rows)] = np.float32(9)
    logits[np.arange(rows), rng.integers(0, vocab, rows)] = np.float32(9)
    return logits


def _dyadic(rng: np.random.Generator, rows: int, vocab: int) -> Array:
    """Distributions in multiples of 1 / 64, whose sums are exact in any order."""
    counts = [np.bincount(rng.integers(0, vocab, 64), minlength=vocab) for _ in range(rows)]
    return (np.stack(counts) / 64).astype(np.float32)


def _fed(rng: np.random.Generator, drafted: Array, vocab: int) -> Feed:
    ids = np.concatenate([rng.integers(0, vocab, 1), drafted])[None].astype(np.int64)
    return {INPUT_IDS: ids, ROW_INDICES: np.arange(len(drafted) + 1)}


def _drafted(rng: np.random.Generator, tokens: Array, vocab: int) -> Array:
    """The target's own tokens, from some place on others."""
    drafted = tokens[:-1].copy()
    drafted[int(rng.integers(0, len(tokens))) :] = int(rng.integers(0, vocab))
    return drafted


def _scalar(value: float, dtype: str = "float32") -> Array:
    return np.array([value], dtype)


def _verified(tokens: Array, accepted: int) -> Feed:
    return {TOKENS: np.asarray(tokens, np.int64), NUM_ACCEPTED: _scalar(accepted, "int64")}


def _match(rng: np.random.Generator, rows: int, vocab: int) -> Case:
    logits = _tied(rng, rows, vocab)
    if rng.random() < 0.3:
        logits[-1] = -np.inf
    tokens = numpy_samplers.greedy(logits)
    drafted = _drafted(rng, tokens, vocab)
    return Case({LOGITS: logits, **_fed(rng, drafted, vocab)}, _verified(tokens, numpy_samplers.match(tokens, drafted)))


def _penalties(rng: np.random.Generator, rows: int, vocab: int) -> Case:
    logits = rng.normal(0, 2, (rows, vocab)).astype(np.float32)
    drafted = rng.integers(0, vocab, rows - 1)
    context, bias = rng.integers(0, 3, vocab).astype(np.float32), rng.normal(0, 1, vocab).astype(np.float32)
    output = np.minimum(context, rng.integers(0, 2, vocab)).astype(np.float32)
    ending = np.where(np.arange(vocab) < 3, -np.inf, np.inf).astype(np.float32)
    unending = int(rng.integers(0, rows + 1))
    feed = {LOGITS: logits, **_fed(rng, drafted, vocab), CONTEXT_COUNTS: context, OUTPUT_COUNTS: output}
    feed |= {LOGIT_BIAS: bias, ENDING_LIMIT: ending, NUM_UNENDING_ROWS: _scalar(unending, "int64")}
    given = {REPETITION_PENALTY: 1.25, PRESENCE_PENALTY: 0.5, FREQUENCY_PENALTY: 0.25}
    feed |= {name: _scalar(value) for name, value in given.items()}
    processed = numpy_samplers.penalize(logits, drafted, context, output, bias, ending, unending, *given.values())
    return Case(feed, {PROCESSED_LOGITS: processed})


def _softmax(rng: np.random.Generator, rows: int, vocab: int) -> Case:
    logits, temperature = _tied(rng, rows, vocab), float(rng.choice([0.5, 1.0, 2.0]))
    return Case(
        {LOGITS: logits, TEMPERATURE: _scalar(temperature)}, {PROBS: numpy_samplers.softmax(logits, temperature)}
    )


def _filter(rng: np.random.Generator, rows: int, vocab: int) -> Case:
    """Top-k leaves few enough ids that the first filter has sorted all of the nucleus."""
    logits, top_k, top_p, min_p = _tied(rng, rows, vocab), int(rng.integers(1, 20)), 0.9, 0.01
    feed = {LOGITS: logits, TEMPERATURE: _scalar(1.0), TOP_K: _scalar(top_k, "int64")}
    feed |= {TOP_P: _scalar(top_p), MIN_P: _scalar(min_p)}
    probs = numpy_samplers.filtered(logits, 1.0, top_k, top_p, min_p)
    return Case(feed, {PROBS: probs, NUCLEUS_IS_LARGER: np.zeros(rows, np.int64)})


def _nucleus(rng: np.random.Generator, rows: int, vocab: int) -> Case:
    """The nucleus is larger than what was sorted: it is found among all ids."""
    logits, top_p, min_p = _tied(rng, rows, vocab), 0.95, 0.0
    feed = {LOGITS: logits, TEMPERATURE: _scalar(2.0), TOP_P: _scalar(top_p), MIN_P: _scalar(min_p)}
    feed |= {THRESHOLD: np.full(rows, -np.inf, np.float32), NUCLEUS_IS_LARGER: np.ones(rows, np.int64)}
    return Case(feed, {PROBS: numpy_samplers.filtered(logits, 2.0, 0, top_p, min_p)})


def _uniforms(rng: np.random.Generator, rows: int) -> Array:
    return rng.random((rows, NUM_UNIFORMS), np.float32)


def _match_sampled(rng: np.random.Generator, rows: int, vocab: int) -> Case:
    probs, uniforms = _dyadic(rng, rows, vocab), _uniforms(rng, rows)
    tokens = np.array([numpy_samplers.draw(p, u[CHUNK], u[WITHIN]) for p, u in zip(probs, uniforms, strict=True)])
    drafted = _drafted(rng, tokens, vocab)
    accepted = numpy_samplers.match(tokens, drafted)
    return Case({PROBS: probs, **_fed(rng, drafted, vocab), UNIFORMS: uniforms}, _verified(tokens, accepted))


def _block(rng: np.random.Generator, rows: int, vocab: int) -> Case:
    p, q, uniforms = _dyadic(rng, rows, vocab), _dyadic(rng, rows, vocab), _uniforms(rng, rows)
    for row in range(rows):  # near each other, so that some of a draft is accepted
        q[row] = p[row] if rng.random() < 0.6 else q[row]
    drafted = np.array([int(rng.choice(vocab, p=row.astype(np.float64))) for row in q[:-1]], np.int64)
    final = (uniforms[0, CHUNK], uniforms[0, WITHIN])
    accepted, token = numpy_samplers.block(p, q[:-1], drafted, uniforms[: rows - 1, ACCEPT], final)
    feed = {PROBS: p, DRAFT_PROBS: q, **_fed(rng, drafted, vocab), UNIFORMS: uniforms}
    return Case(feed, _verified(np.full(rows, token), accepted))


def _logprobs(rng: np.random.Generator, rows: int, vocab: int) -> Case:
    logits, chosen = rng.normal(0, 2, (rows, vocab)).astype(np.float32), rng.integers(0, vocab, rows)
    found = numpy_samplers.logprobs(logits, chosen, min(MAX_TOP_LOGPROBS, vocab))
    return Case(
        {LOGITS: logits, CHOSEN_IDS: chosen}, dict(zip((TOKEN_LOGPROBS, TOP_LOGPROBS, TOP_IDS), found, strict=True))
    )


_MAKERS: dict[str, Callable[[np.random.Generator, int, int], Case]] = {
    MATCH: _match,
    PENALTIES: _penalties,
    SOFTMAX: _softmax,
    FILTER: _filter,
    FILTER_WIDE: _filter,
    NUCLEUS: _nucleus,
    MATCH_SAMPLED: _match_sampled,
    BLOCK: _block,
    LOGPROBS: _logprobs,
}
