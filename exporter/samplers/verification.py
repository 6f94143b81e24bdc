"""The samplers that verify drafted ids: the accept rules of ``specrt.engines.numpy_samplers``, without a loop over ids
or tokens.

``R`` = K + 1 rows, ``V`` the target's vocabulary. No node reads a shape: what follows from one in 64-bit integers would
be computed on the host by ONNX Runtime's CUDA provider, with a copy and a wait in each round.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from specrt.engines.contract import LOGITS, NUM_ACCEPTED, TOKENS
from specrt.engines.numpy_samplers import MIN_RESIDUAL, chunk_size
from specrt.engines.samplers import ACCEPT, CHUNK, DRAFT_PROBS, PROBS, UNIFORMS, WITHIN
from specrt.exporter.samplers.ties import first_of_largest, first_true
from specrt.exporter.samplers.writer import END, GraphWriter, row_numbers, running_sums


def write_match(g: GraphWriter, drafted: str, vocab_size: int) -> None:
    """``match`` at temperature 0: the first most likely id of each row."""
    tokens = g.Squeeze(first_of_largest(g, LOGITS, vocab_size), g.ints(1), named=TOKENS)  # [R]
    _write_first(g, g.Not(g.Equal(tokens, drafted)))


def write_match_sampled(g: GraphWriter, drafted: str, vocab_size: int) -> None:
    """``match`` above temperature 0: each row draws with its own uniforms."""
    tokens = g.Squeeze(_draw(g, PROBS, UNIFORMS, vocab_size), g.ints(1), named=TOKENS)  # [R]
    _write_first(g, g.Not(g.Equal(tokens, drafted)))


def write_block(g: GraphWriter, drafted: str, vocab_size: int, max_rows: int) -> None:
    """``numpy_samplers.block``. The running minimum P is unrolled over the K of the bundle."""
    index = row_numbers(g, drafted)  # [R]
    is_last = g.Greater(_last_row(g, drafted), g.const([0.0]))  # [R]
    ratios = g.Div(_at(g, PROBS, drafted), g.Max(_at(g, DRAFT_PROBS, drafted), g.const([np.finfo(np.float32).tiny])))
    prefixes = _running_minimum(g, ratios, index, max_rows)  # [R], P_0 .. P_K
    weighted = g.Mul(PROBS, g.Unsqueeze(prefixes, g.ints(1)))  # [R, V]
    missing = g.ReduceSum(g.Max(g.Sub(weighted, DRAFT_PROBS), g.const([0.0])), g.ints(1), keepdims=0)  # S_i, [R]
    rest = g.Add(missing, g.Sub(g.const([1.0]), prefixes))
    chance = g.Where(g.Greater(rest, g.const([0.0])), g.Div(missing, rest), g.const([1.0]))
    chance = g.Where(is_last, prefixes, chance)  # h_0 .. h_K; h_0 is not used
    # Row i holds eta_(i + 1), which decides on h_(i + 1): shift the chances up and mark the row beyond the last.
    hit = g.Less(_column(g, ACCEPT), g.Concat(_after_first(g, chance), g.const([0.0]), axis=0))  # [R]
    lengths = g.Where(hit, g.Add(index, g.ints(1)), g.ints(0))  # [R]
    accepted = g.ReduceMax(lengths, g.ints(0), keepdims=1, named=NUM_ACCEPTED)  # [1], the largest: no break at a miss
    _write_residual(g, drafted, accepted, g.Gather(prefixes, accepted), vocab_size)


def _write_first(g: GraphWriter, misses: str) -> str:
    """The index of the first miss; the last row verifies no id and ends every draft. [1] i64"""
    rows = g.Slice(g.Cast(misses, to=TensorProto.FLOAT), g.ints(0), g.ints(-1), g.ints(0))  # [R - 1]
    first = first_true(g, g.Concat(rows, g.const([1.0]), axis=0))
    return str(g.Identity(first, named=NUM_ACCEPTED))


def _write_residual(g: GraphWriter, drafted: str, accepted: str, prefix: str, vocab_size: int) -> None:
    """The next id from norm((prefix p - q)+) of row ``accepted``, or from p where it verifies no id; in all rows."""
    p, q = g.Gather(PROBS, accepted), g.Gather(DRAFT_PROBS, accepted)  # [1, V] each
    residual = g.Max(g.Sub(g.Mul(p, prefix), q), g.const([0.0]))
    enough = g.Greater(g.ReduceSum(residual, g.ints(1), keepdims=1), g.const([float(MIN_RESIDUAL)]))  # [1, 1]
    use = g.And(enough, g.Less(g.Gather(_last_row(g, drafted), accepted), g.const([1.0])))
    first = g.Slice(UNIFORMS, g.ints(0), g.ints(1), g.ints(0))  # [1, 3]
    weights = g.Gather(g.Concat(p, residual, axis=0), g.Reshape(g.Cast(use, to=TensorProto.INT64), g.ints(1)))  # [1, V]
    drawn = _draw(g, weights, first, vocab_size)  # [1, 1]
    g.Add(g.Mul(drafted, g.ints(0)), g.Squeeze(drawn, g.ints(1)), named=TOKENS)


def _draw(g: GraphWriter, weights: str, uniforms: str, vocab_size: int) -> str:
    """``numpy_samplers.draw`` of each row. [R, V], [R, 3] -> [R, 1] i64"""
    size = chunk_size(vocab_size)
    padding = -vocab_size % size
    if padding:
        weights = g.Pad(weights, g.ints(0, 0, 0, padding))
    num_chunks = (vocab_size + padding) // size
    chunks = g.Reshape(weights, g.ints(-1, num_chunks, size))  # [R, N, S]
    sums = g.ReduceSum(chunks, g.ints(2), keepdims=0)  # [R, N]
    chunk = _inverse_cdf(g, sums, g.Slice(uniforms, g.ints(CHUNK), g.ints(CHUNK + 1), g.ints(1)), num_chunks)
    inner = g.GatherND(chunks, chunk, batch_dims=1)  # [R, S]
    within = _inverse_cdf(g, inner, g.Slice(uniforms, g.ints(WITHIN), g.ints(WITHIN + 1), g.ints(1)), size)
    return str(g.Add(g.Mul(chunk, g.ints(size)), within))


def _inverse_cdf(g: GraphWriter, weights: str, uniform: str, length: int) -> str:
    """The first index whose cumulated weight exceeds ``uniform`` [R, 1] of the total. [R, N] -> [R, 1] i64"""
    cumulated = running_sums(g, weights, length)
    total = g.Slice(cumulated, g.ints(length - 1), g.ints(length), g.ints(1))
    passed = g.And(g.LessOrEqual(cumulated, g.Mul(uniform, total)), g.Less(cumulated, total))
    index = g.ReduceSum(g.Cast(passed, to=TensorProto.FLOAT), g.ints(1), keepdims=1)
    return str(g.Cast(index, to=TensorProto.INT64))


def _running_minimum(g: GraphWriter, ratios: str, index: str, max_rows: int) -> str:
    """P_0 = 1, P_i = min(P_(i-1) ratio_i, 1) for the rows ``index``, of ``max_rows`` at most. [R] -> [R]"""
    padded = g.Concat(ratios, g.const([1.0] * max_rows), axis=0)
    prefix = g.const([1.0])
    prefixes = [prefix]
    for row in range(max_rows - 1):
        ratio = g.Slice(padded, g.ints(row), g.ints(row + 1), g.ints(0))
        prefix = g.Min(g.Mul(prefix, ratio), g.const([1.0]))
        prefixes.append(prefix)
    return str(g.Gather(g.Concat(*prefixes, axis=0), index))


def _at(g: GraphWriter, probs: str, drafted: str) -> str:
    """The probability of each row's drafted id. [R, V] -> [R]"""
    return str(g.Squeeze(g.GatherElements(probs, g.Unsqueeze(drafted, g.ints(1)), axis=1), g.ints(1)))


def _column(g: GraphWriter, column: int) -> str:
    return str(g.Squeeze(g.Slice(UNIFORMS, g.ints(column), g.ints(column + 1), g.ints(1)), g.ints(1)))


def _after_first(g: GraphWriter, rows: str) -> str:
    return str(g.Slice(rows, g.ints(1), g.ints(END), g.ints(0)))


def _last_row(g: GraphWriter, drafted: str) -> str:
    """1 for the last row, 0 for those before. [R] -> [R] f32"""
    zeros = g.Mul(g.Cast(drafted, to=TensorProto.FLOAT), g.const([0.0]))
    return str(g.Concat(g.Slice(zeros, g.ints(1), g.ints(END), g.ints(0)), g.const([1.0]), axis=0))
