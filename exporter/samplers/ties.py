"""The first of equals, on every device: neither ArgMax nor TopK promises which of equal values it names.

TensorRT says nothing of ties, and ONNX Runtime's CUDA provider asks cuDNN, which does not either; of a row that is -inf
throughout it names the id 2147483647. The least index of those that equal the largest value is defined everywhere.
Indices are computed as float32, which holds every id below 2**24.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from specrt.engines.numpy_samplers import chunk_size
from specrt.exporter.samplers.writer import GraphWriter, row_numbers


def first_of_largest(g: GraphWriter, rows: str, length: int) -> str:
    """The first id of the largest value in each row; 0 where all are -inf. [R, V] -> [R, 1] i64

    In two levels, so that whole rows are read once: the first chunk that has the largest value, the first in it.
    """
    size = chunk_size(length)
    padding = -length % size
    if padding:
        rows = g.Pad(rows, g.ints(0, 0, 0, padding), g.const(-np.inf))
    count = (length + padding) // size
    if count == 1:
        return _first_of_few(g, rows, length)
    chunks = g.Reshape(rows, g.ints(-1, count, size))  # [R, N, S]
    chunk = _first_of_few(g, g.ReduceMax(chunks, g.ints(2), keepdims=0), count)
    within = _first_of_few(g, g.GatherND(chunks, chunk, batch_dims=1), size)
    found = g.Add(g.Mul(chunk, g.ints(size)), within)
    return str(g.Min(found, g.ints(length - 1)) if padding else found)  # NaN equals nothing


def first_true(g: GraphWriter, flags: str) -> str:
    """The index of the first that is 1.0, of which there must be one. [R] f32 -> [1] i64"""
    found = g.Where(g.Greater(flags, g.const([0.0])), row_numbers(g, flags, "float32"), g.const([2.0**24]))
    return str(g.Cast(g.ReduceMin(found, g.ints(0), keepdims=1), to=TensorProto.INT64))


def largest_in_order(g: GraphWriter, rows: str, length: int, count: int) -> tuple[str, str]:
    """The ``count`` largest values of each row, and their ids; of equals the least come first. [R, C] f32, i64

    Which ids are above the least of them is certain; those that equal it are picked by a second TopK, of their ids.
    """
    values, ids = g.TopK(rows, g.ints(count), axis=-1, outputs=2)
    least = g.Slice(values, g.ints(count - 1), g.ints(count), g.ints(1))  # [R, 1]
    above = g.Cast(g.Greater(values, least), to=TensorProto.FLOAT)  # [R, C]
    named = g.Cast(ids, to=TensorProto.FLOAT)
    mine, other = g.ints(2), g.ints(1)
    is_larger = g.Greater(g.Unsqueeze(values, other), g.Unsqueeze(values, mine))
    is_equal = g.Equal(g.Unsqueeze(values, other), g.Unsqueeze(values, mine))
    is_earlier = g.Less(g.Unsqueeze(named, other), g.Unsqueeze(named, mine))
    before = g.Cast(g.Or(is_larger, g.And(is_equal, is_earlier)), to=TensorProto.FLOAT)  # [R, C, C]
    places = g.Where(
        g.Greater(above, g.const([0.0])), g.ReduceSum(before, g.ints(2), keepdims=0), g.const([float(count)])
    )
    # Range is folded when a graph is loaded: nothing of the vocabulary's size is stored.
    falling = g.Range(g.const(0.0), g.const(-float(length)), g.const(-1.0))  # [V]
    equals, _ = g.TopK(
        g.Where(g.Equal(rows, least), falling, g.const([-(2.0**24)])), g.ints(count), axis=-1, outputs=2
    )  # [R, C], from the first id on
    numbers = g.const(np.arange(count))
    further = g.Add(g.ReduceSum(above, g.ints(1), keepdims=1), numbers)  # [R, C], the place of each
    sorted_ids = g.Add(_placed(g, named, places, count), _placed(g, g.Neg(equals), further, count))
    return str(values), str(g.Cast(sorted_ids, to=TensorProto.INT64))


def _placed(g: GraphWriter, items: str, places: str, count: int) -> str:
    """``items`` at their ``places`` of 0 .. C - 1, and 0 where none is; other places are left out. [R, C] f32 each"""
    wanted = g.const(np.arange(count)[:, None])  # [C, 1]
    is_there = g.Equal(g.Unsqueeze(places, g.ints(1)), wanted)  # [R, C, C]
    return str(g.ReduceSum(g.Where(is_there, g.Unsqueeze(items, g.ints(1)), g.const([0.0])), g.ints(2), keepdims=0))


def _first_of_few(g: GraphWriter, rows: str, length: int) -> str:
    largest = g.ReduceMax(rows, g.ints(1), keepdims=1)  # [R, 1]
    numbers = g.Where(g.Equal(rows, largest), g.const(np.arange(length)), g.const([float(length - 1)]))
    return str(g.Cast(g.ReduceMin(numbers, g.ints(1), keepdims=1), to=TensorProto.INT64))
