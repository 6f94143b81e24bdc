"""Reference implementation of the samplers in numpy, written for reading. fp32 throughout, as in the graphs.

``p`` and ``q`` are the target's and the draft's distributions after the same warping; ``drafted`` are the K ids
``x_1 .. x_K`` with ``x_i`` drawn from row ``i`` of ``q``. Of the K + 1 rows of ``p``, row ``i`` verifies ``x_(i + 1)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrt.engines.interface import Array

MIN_RESIDUAL = np.float32(1e-7)  # a smaller mass is rounding error: the residual is then drawn from p itself


def match(tokens: Array, drafted: Array) -> int:
    """How many leading ``drafted`` [K] equal the target's own ``tokens`` [K + 1]."""
    hits = tokens[: len(drafted)] == drafted
    return int(np.argmin(np.append(hits, False)))


def greedy(logits: Array) -> Array:
    """The first most likely id of each row. [R, V] f32 -> [R] i64"""
    tokens: Array = np.argmax(logits, axis=-1)
    return tokens


def penalize(
    logits: Array,
    drafted: Array,
    context_counts: Array,
    output_counts: Array,
    logit_bias: Array,
    ending_limit: Array,
    num_unending_rows: int,
    repetition_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
) -> Array:
    """Penalties as in transformers (repetition) and the OpenAI API (presence, frequency). [R, V] f32 -> [R, V] f32

    Row ``i`` counts the drafted ids ``drafted[:i]`` in addition to the ``*_counts`` [V] of committed tokens. Before the
    penalties the bias [V] is added, and ``ending_limit`` [V] bounds the first ``num_unending_rows`` rows from above.
    """
    processed = []
    for row, values in enumerate(logits):
        ahead = np.bincount(drafted[:row], minlength=len(values)).astype(np.float32)
        values = values + logit_bias
        if row < num_unending_rows:
            values = np.minimum(values, ending_limit)
        divisor = 1 + (context_counts + ahead > 0) * (np.float32(repetition_penalty) - 1)
        in_output = output_counts + ahead
        subtracted = np.float32(presence_penalty) * (in_output > 0) + np.float32(frequency_penalty) * in_output
        processed.append(np.maximum(values, 0) / divisor + np.minimum(values, 0) * divisor - subtracted)
    return np.stack(processed).astype(np.float32)


def softmax(logits: Array, temperature: float) -> Array:
    """Probabilities at ``temperature`` > 0. [R, V] f32 -> [R, V] f32"""
    return _normalized(logits / np.float32(temperature))


def filtered(logits: Array, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Array:
    """Probabilities after temperature, top-k, top-p and min-p, in this order. [R, V] f32 -> [R, V] f32

    Each filter is a threshold, so that ids tied with the last one kept are kept too; top-p is the smallest set of most
    likely ids whose probability (among those that top-k left) reaches ``top_p``. ``top_k`` 0 means all.
    """
    scaled = logits / np.float32(temperature)
    rows = [np.where(z >= filter_threshold(z, top_k, top_p, min_p), z, -np.inf) for z in scaled]
    return _normalized(np.stack(rows).astype(np.float32))


def filter_threshold(z: Array, top_k: int, top_p: float, min_p: float) -> np.float32:
    """The least value of ``z`` = logits / temperature [V] that is kept."""
    threshold = np.sort(z)[-top_k] if 0 < top_k < len(z) else np.float32(-np.inf)
    if top_p < 1:
        kept = np.sort(z[z >= threshold])[::-1]
        weights = np.exp(kept - kept[0])
        before = (np.cumsum(weights, dtype=np.float64) - weights) / weights.sum(dtype=np.float64)
        threshold = kept[before < np.float32(top_p)][-1] if top_p > 0 else kept[0]
    if min_p > 0:
        threshold = max(threshold, z.max() + np.log(np.float32(min_p)))
    return np.float32(threshold)


def _normalized(z: Array) -> Array:
    weights = np.exp(z - z.max(axis=-1, keepdims=True))
    normalized: Array = (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)
    return normalized


def chunk_size(vocab_size: int) -> int:
    """Ids summed at the first level of ``draw``: the largest divisor in 64..1024, or 512 if there is none.

    A flat fp32 sum over 150,000 ids would lose the tail of the distribution.
    """
    if vocab_size <= 1024:
        return vocab_size
    return next((size for size in range(1024, 63, -1) if vocab_size % size == 0), 512)


def draw(weights: Array, chunk_uniform: float, within_uniform: float) -> int:
    """An id from ``weights`` [V] f32, not necessarily normalized, by inverse CDF in two levels.

    The first uniform chooses a chunk by its sum, the second an id in it. Only ids of positive weight are drawn.
    """
    size = chunk_size(len(weights))
    chunks = np.pad(weights, (0, -len(weights) % size)).reshape(-1, size)  # [N, S]
    chunk = _inverse_cdf(chunks.sum(axis=1, dtype=np.float32), chunk_uniform)
    return chunk * size + _inverse_cdf(chunks[chunk], within_uniform)


def _inverse_cdf(weights: Array, uniform: float) -> int:
    """The first index whose cumulated weight exceeds ``uniform`` of the total."""
    cumulated = np.cumsum(weights, dtype=np.float32)
    total = cumulated[-1]
    passed = (cumulated <= np.float32(uniform) * total) & (cumulated < total)
    return int(passed.sum())


def block(p: Array, q: Array, drafted: Array, eta: Array, final: tuple[float, float]) -> tuple[int, int]:
    """Block verification (arXiv 2403.10444, algorithm 2): accepted n and the next token.

    ``p`` [K + 1, V], ``q`` [K, V]; ``eta`` [K] decides on the drafted ids, ``final`` draws the next one.
    The accepted length is the *largest* i with ``eta_i < h_i``: a failure at i does not end the search.
    """
    prefixes = block_prefixes(p, q, drafted)
    hits = np.asarray(eta[: len(drafted)], np.float32) < block_chances(p, q, drafted)  # [K]
    accepted = max((i for i, hit in enumerate(hits, 1) if hit), default=0)
    return accepted, _draw_residual(p, q, accepted, prefixes[accepted], final)


def block_prefixes(p: Array, q: Array, drafted: Sequence[int] | Array) -> list[np.float32]:
    """P_0 = 1, P_i = min(P_(i-1) p(x_i) / q(x_i), 1), for i up to K."""
    prefixes = [np.float32(1)]
    for row, x in enumerate(drafted):
        ratio = p[row, x] / max(q[row, x], np.finfo(np.float32).tiny)
        prefixes.append(np.float32(min(prefixes[-1] * ratio, np.float32(1))))
    return prefixes


def block_chances(p: Array, q: Array, drafted: Sequence[int] | Array) -> Array:
    """h_1 .. h_K: the probability that i drafted ids are accepted, given that no more are. [K] f32"""
    chances = []
    for i, prefix in enumerate(block_prefixes(p, q, drafted)):
        if i == len(drafted):
            chances.append(prefix)
            break
        missing = np.maximum(prefix * p[i] - q[i], 0).sum(dtype=np.float32)  # S_i
        rest = missing + (1 - prefix)
        chances.append(np.float32(missing / rest) if rest > 0 else np.float32(1))
    return np.array(chances[1:], np.float32)


def _draw_residual(p: Array, q: Array, accepted: int, prefix: np.float32, final: tuple[float, float]) -> int:
    """From norm((prefix p - q)+) after a rejection, from p after full acceptance."""
    weights = p[accepted]
    if accepted < len(q):
        residual = np.maximum(prefix * p[accepted] - q[accepted], 0)
        if residual.sum(dtype=np.float32) > MIN_RESIDUAL:
            weights = residual
    return draw(weights, *final)


def logprobs(logits: Array, chosen: Array, num_top: int) -> tuple[Array, Array, Array]:
    """Log-probabilities of ``chosen`` [R], and the ``num_top`` largest with their ids, [R, num_top] each."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    top = np.argsort(-logs, axis=-1, kind="stable")[:, :num_top]
    return logs[np.arange(len(chosen)), chosen], np.take_along_axis(logs, top, axis=-1), top
