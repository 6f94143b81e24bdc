"""The samplers that turn logits into probabilities, penalties before them, and log-probabilities.

``R`` rows, ``V`` the model's vocabulary, ``T`` the target's. Loops are unrolled, and nothing is scattered: TensorRT has
no scatter with a reduction, and sorts at most 3840 ids.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from specrt.engines.contract import LOGITS
from specrt.engines.samplers import (
    CHOSEN_IDS,
    CONTEXT_COUNTS,
    ENDING_LIMIT,
    FREQUENCY_PENALTY,
    LOGIT_BIAS,
    MAX_TOP_LOGPROBS,
    MIN_P,
    NUCLEUS_IS_LARGER,
    NUM_UNENDING_ROWS,
    OUTPUT_COUNTS,
    PRESENCE_PENALTY,
    PROBS,
    PROCESSED_LOGITS,
    REPETITION_PENALTY,
    TEMPERATURE,
    THRESHOLD,
    TOKEN_LOGPROBS,
    TOP_IDS,
    TOP_K,
    TOP_LOGPROBS,
    TOP_P,
)
from specrt.exporter.samplers.ties import largest_in_order
from specrt.exporter.samplers.writer import GraphWriter, barrier, row_numbers, running_sums

# Halvings of the interval [maximum - SPAN, maximum] that contains the threshold, down to neighbouring fp32 numbers.
_SPAN = 104.0  # exp(-104) is 0 in fp32
_HALVINGS = 32


def write_penalties(g: GraphWriter, drafted: str) -> None:
    """``numpy_samplers.penalize``. ``drafted`` [R] are the ids that rows verify, 0 in the last.

    All rows share the counts of committed tokens; the logits of ids drafted before a row are computed again for it.
    """
    index = row_numbers(g, drafted)  # [R], from 0
    unended = g.Min(LOGIT_BIAS, ENDING_LIMIT)  # [V]
    biases = g.Concat(*(g.Unsqueeze(bias, g.ints(0)) for bias in (LOGIT_BIAS, unended)), axis=0)  # [2, V]
    is_unended = g.Cast(g.Less(index, NUM_UNENDING_ROWS), to=TensorProto.INT64)  # [R]
    logits = g.Add(LOGITS, g.Gather(biases, is_unended))  # [R, V]
    penalized = _penalized(g, logits, CONTEXT_COUNTS, OUTPUT_COUNTS)
    rows, columns = g.Unsqueeze(drafted, g.ints(1)), g.Unsqueeze(drafted, g.ints(0))  # [R, 1], [1, R]
    same = g.Cast(g.Equal(rows, columns), to=TensorProto.FLOAT)  # [R, R]
    earlier = g.Less(g.Unsqueeze(index, g.ints(0)), g.Unsqueeze(index, g.ints(1)))  # [R, R]: column before row
    ahead = g.MatMul(g.Cast(earlier, to=TensorProto.FLOAT), same)  # [R, R]: times id j was drafted before row i
    ids = g.Add(g.Mul(rows, g.ints(0)), columns)  # [R, R]
    counts = [g.Add(g.Gather(name, drafted), ahead) for name in (CONTEXT_COUNTS, OUTPUT_COUNTS)]  # [R, R] each
    again = _penalized(g, g.GatherElements(logits, ids, axis=1), *counts)
    g.ScatterElements(penalized, ids, again, axis=1, named=PROCESSED_LOGITS)


def _penalized(g: GraphWriter, logits: str, in_context: str, in_output: str) -> str:
    """Uses few operations on whole rows, since they take most of this sampler's time.

    A logit divided where positive and multiplied where negative is the smaller of the two results, for a penalty above
    1, and the larger below.
    """
    one = g.const([1.0])
    sign = g.Where(g.Less(REPETITION_PENALTY, one), g.const([-1.0]), one)  # [1]
    divisor = g.Add(g.Mul(g.Min(in_context, one), g.Sub(REPETITION_PENALTY, one)), one)
    signed = g.Mul(divisor, sign)
    repeated = g.Mul(g.Min(g.Mul(logits, signed), g.Div(logits, signed)), sign)
    present = g.Mul(g.Min(in_output, one), PRESENCE_PENALTY)
    return str(g.Sub(repeated, g.Add(present, g.Mul(in_output, FREQUENCY_PENALTY))))


def write_softmax(g: GraphWriter, model_vocab: int, target_vocab: int) -> None:
    """``numpy_samplers.softmax``."""
    _write_probs(g, g.Softmax(_scaled(g, model_vocab, target_vocab), axis=-1), model_vocab, target_vocab)


def write_filter(g: GraphWriter, model_vocab: int, target_vocab: int, num_sorted: int) -> None:
    """``numpy_samplers.filtered`` if all kept ids are among the ``num_sorted`` most likely; other rows are flagged.

    Masks are multiplied, not selected: ``Where`` on whole rows costs ten times as much on ONNX Runtime's CPU.
    """
    vocab_size = min(model_vocab, target_vocab)
    scaled = _scaled(g, model_vocab, target_vocab)  # [R, V]
    ordered, _ = g.TopK(scaled, g.ints(min(num_sorted, vocab_size)), axis=-1, outputs=2)  # [R, S], descending
    largest = g.Slice(ordered, g.ints(0), g.ints(1), g.ints(1))  # [R, 1]
    weights = g.Exp(g.Sub(scaled, largest))  # [R, V]
    smallest = _last(g, ordered, min(num_sorted, vocab_size))
    by_k = g.Gather(ordered, g.Min(g.Max(g.Sub(TOP_K, g.ints(1)), g.ints(0)), g.ints(vocab_size - 1)), axis=1)
    has_top_k, has_top_p = g.Greater(TOP_K, g.ints(0)), g.Less(TOP_P, g.const([1.0]))  # [1] each
    by_k = g.Where(has_top_k, by_k, g.const([-np.inf]))  # [R, 1]
    sorted_weights = g.Mul(g.Exp(g.Sub(ordered, largest)), _mask(g, g.GreaterOrEqual(ordered, by_k)))  # [R, S]
    mass = g.Where(has_top_k, _sum(g, sorted_weights), _sum(g, weights))
    wanted = g.Mul(mass, TOP_P)  # [R, 1]
    cumulated = running_sums(g, sorted_weights, min(num_sorted, vocab_size))
    reaches = g.GreaterOrEqual(_last(g, cumulated, min(num_sorted, vocab_size)), wanted)
    whole_top_k = g.Or(g.Not(has_top_k), g.Less(smallest, by_k))  # no tie with the k-th is beyond what is sorted
    fits = g.Or(g.Not(has_top_p), g.And(reaches, whole_top_k))
    fits = g.Or(fits, g.const([num_sorted >= vocab_size], "bool"))  # [R, 1]
    kept = g.And(g.Less(g.Sub(cumulated, sorted_weights), wanted), g.Greater(sorted_weights, g.const([0.0])))
    by_p = g.ReduceMin(g.Where(kept, ordered, largest), g.ints(1), keepdims=1)  # [R, 1]
    by_p = g.Where(has_top_p, by_p, by_k)
    threshold = g.Where(fits, g.Max(by_p, _least(g, largest)), by_k)
    g.Squeeze(threshold, g.ints(1), named=THRESHOLD)
    g.Squeeze(g.Cast(g.Not(fits), to=TensorProto.INT64), g.ints(1), named=NUCLEUS_IS_LARGER)
    _write_masked(g, weights, _mask(g, g.GreaterOrEqual(scaled, threshold)), model_vocab, target_vocab)


def write_nucleus(g: GraphWriter, model_vocab: int, target_vocab: int) -> None:
    """The rest of ``numpy_samplers.filtered``: flagged rows find their threshold by bisection, without a sort."""
    scaled = _scaled(g, model_vocab, target_vocab)  # [R, V]
    largest = g.ReduceMax(scaled, g.ints(1), keepdims=1)  # [R, 1]
    given = g.Unsqueeze(THRESHOLD, g.ints(1))
    below = g.Sub(scaled, largest)  # [R, V], <= 0
    weights = g.Exp(below)
    allowed = g.Mul(weights, _mask(g, g.GreaterOrEqual(scaled, given)))
    wanted = g.Mul(_sum(g, allowed), TOP_P)  # [R, 1]
    low, high = g.Sub(g.Sub(largest, largest), g.const([_SPAN])), g.Sub(largest, largest)  # [R, 1] each
    for _ in range(_HALVINGS):
        middle = g.Mul(g.Add(low, high), g.const([0.5]))
        enough = g.GreaterOrEqual(_sum(g, g.Mul(allowed, _mask(g, g.GreaterOrEqual(below, middle)))), wanted)
        # Joined steps would each double TensorRT's build time.
        low, high = (barrier(g, b) for b in (g.Where(enough, middle, low), g.Where(enough, high, middle)))
    flagged = g.Unsqueeze(g.Greater(NUCLEUS_IS_LARGER, g.ints(0)), g.ints(1))  # [R, 1]
    low = g.Where(flagged, low, g.const([-np.inf]))
    threshold = g.Where(flagged, g.Max(given, _least(g, largest)), given)
    kept = g.Mul(_mask(g, g.GreaterOrEqual(below, low)), _mask(g, g.GreaterOrEqual(scaled, threshold)))
    _write_masked(g, weights, kept, model_vocab, target_vocab)


def write_logprobs(g: GraphWriter, model_vocab: int) -> None:
    """``numpy_samplers.logprobs``."""
    logs = g.LogSoftmax(LOGITS, axis=-1)  # [R, V]
    chosen = g.GatherElements(logs, g.Unsqueeze(CHOSEN_IDS, g.ints(1)), axis=1)  # [R, 1]
    g.Squeeze(chosen, g.ints(1), named=TOKEN_LOGPROBS)
    values, ids = largest_in_order(g, logs, model_vocab, min(MAX_TOP_LOGPROBS, model_vocab))
    g.Identity(values, named=TOP_LOGPROBS)
    g.Identity(ids, named=TOP_IDS)


def _scaled(g: GraphWriter, model_vocab: int, target_vocab: int) -> str:
    """Logits over the temperature, without the ids that only the draft has. [R, min(V, T)]"""
    logits = LOGITS
    if model_vocab > target_vocab:
        logits = g.Slice(LOGITS, g.ints(0), g.ints(target_vocab), g.ints(1))
    return str(g.Div(logits, TEMPERATURE))


def _write_masked(g: GraphWriter, weights: str, mask: str, model_vocab: int, target_vocab: int) -> None:
    kept = g.Mul(weights, mask)
    _write_probs(g, g.Div(kept, _sum(g, kept)), model_vocab, target_vocab)


def _write_probs(g: GraphWriter, probs: str, model_vocab: int, target_vocab: int) -> None:
    """Ids that only the target has are impossible."""
    missing = target_vocab - model_vocab
    if missing <= 0:
        g.Identity(probs, named=PROBS)
    else:
        g.Pad(probs, g.ints(0, 0, 0, missing), named=PROBS)


def _mask(g: GraphWriter, condition: str) -> str:
    return str(g.Cast(condition, to=TensorProto.FLOAT))


def _sum(g: GraphWriter, rows: str) -> str:
    return str(g.ReduceSum(rows, g.ints(1), keepdims=1))


def _least(g: GraphWriter, largest: str) -> str:
    """The threshold of min-p; -inf where it is 0. [R, 1]"""
    return str(g.Add(largest, g.Log(MIN_P)))


def _last(g: GraphWriter, rows: str, length: int) -> str:
    return str(g.Slice(rows, g.ints(length - 1), g.ints(length), g.ints(1)))
