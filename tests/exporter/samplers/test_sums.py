"""Running sums and the samplers that use them, for a parser that makes a loop of CumSum: each is a sum of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from specrt.engines.contract import LOGITS, ROWS, STANDARD_22_DIALECT, Contract, TensorSpec
from specrt.engines.fake import fake_spec
from specrt.engines.interface import Array
from specrt.engines.samplers import (
    BLOCK,
    DRAFT_PROBS,
    FILTER,
    FILTER_WIDE,
    MATCH_SAMPLED,
    MIN_P,
    NUCLEUS,
    NUM_UNIFORMS,
    PROBS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    UNIFORMS,
)
from specrt.exporter.samplers import sampler_graph
from specrt.exporter.samplers.writer import GraphWriter, barrier, row_numbers, running_sums
from tests.exporter.samplers.samplers_on_ort import MAX_K, dyadic, fed, sampler, scalar

ROW_COUNT = 5


def session_of(model: onnx.ModelProto) -> Any:
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def computed(rows: Array, function: Any, has_cumsum: bool = False) -> Array:
    """``function`` of a writer and of ``rows`` [R, N]."""
    shapes = [(TensorSpec(name, "float32", (ROWS, rows.shape[1])),) for name in "xy"]
    g = GraphWriter("g", Contract(shapes[0], shapes[1], {ROWS: ROW_COUNT}), has_cumsum)
    g.Identity(function(g, "x"), named="y")
    found: Array = session_of(g.model()).run(None, {"x": rows})[0]
    return found


def weights(size: int) -> Array:
    """Of all magnitudes, with many zeros."""
    rng = np.random.default_rng(size)
    rows = np.exp(rng.normal(0, 6, (ROW_COUNT, size))).astype(np.float32)
    rows[rng.random(rows.shape) < 0.4] = 0
    return rows


def falls(sums: Array) -> bool:
    return bool((np.diff(sums, axis=1) < 0).any())


@pytest.mark.parametrize("size", [1, 2, 7, 128, 737, 1024])
def test_sums_are_those_of_cumsum_and_do_not_fall(size: int) -> None:
    """An id without weight is not drawn: the sum up to it is the sum before it, to the last bit."""
    rows = weights(size)
    sums = computed(rows, lambda g, x: running_sums(g, x, size))
    np.testing.assert_allclose(sums, np.cumsum(rows, axis=1, dtype=np.float64), rtol=1e-5)
    np.testing.assert_allclose(sums, computed(rows, lambda g, x: running_sums(g, x, size), True), rtol=1e-5)
    assert not falls(sums)
    assert (np.diff(sums, axis=1)[rows[:, 1:] == 0] == 0).all()


def test_sums_in_other_orders_fall() -> None:
    """The control: with an order of its own for each sum, some are less than the one before."""
    rows, rng = weights(737), np.random.default_rng(0)
    orders = [rng.permutation(end) for end in range(1, 738)]
    assert falls(np.stack([np.array([row[order].sum() for order in orders]) for row in rows]))


@pytest.mark.parametrize("has_cumsum", [False, True])
def test_a_barrier_and_row_numbers(has_cumsum: bool) -> None:
    column = np.array([[-np.inf], [-104.0], [0.0], [1e-38], [np.inf]], np.float32)
    for count in (1, ROW_COUNT):
        assert computed(column[:count], barrier, has_cumsum).tobytes() == column[:count].tobytes()
        numbers = computed(
            column[:count],
            lambda g, x: g.Unsqueeze(row_numbers(g, g.Squeeze(x, g.ints(1)), "float32"), g.ints(1)),
            has_cumsum,
        )
        assert numbers[:, 0].tolist() == list(range(count))


@pytest.mark.parametrize("vocab_size", [2, 320, 1500, 2053])
@pytest.mark.parametrize("name", [MATCH_SAMPLED, BLOCK, FILTER, FILTER_WIDE, NUCLEUS])
def test_samplers_compute_what_those_of_other_dialects_do(name: str, vocab_size: int) -> None:
    """Ids of weights whose sums are exact are the same."""
    spec = replace(fake_spec(vocab_size, k=MAX_K), dialect=STANDARD_22_DIALECT)
    model = sampler_graph(name, spec, vocab_size)
    assert "CumSum" not in {node.op_type for node in model.graph.node}
    session, usual, rng = session_of(model), sampler(name, vocab_size), np.random.default_rng(vocab_size)
    for _ in range(8):
        given = inputs_of(name, vocab_size, rng)
        names = [tensor.name for tensor in usual.contract.outputs]
        found, expected = dict(zip(names, session.run(names, given), strict=True)), usual.run(given)
        for output, values in expected.items():
            np.testing.assert_allclose(found[output], values, rtol=2e-5, atol=1e-9, err_msg=output)


def inputs_of(name: str, vocab_size: int, rng: np.random.Generator) -> dict[str, Array]:
    rows = MAX_K + 1
    if name in (MATCH_SAMPLED, BLOCK):
        probs = np.stack([dyadic(rng, vocab_size) for _ in range(rows)])
        drafts = np.stack([dyadic(rng, vocab_size) for _ in range(rows)])
        drafted = np.array([rng.choice(vocab_size, p=row.astype(np.float64)) for row in drafts[:-1]])
        uniforms = rng.random((rows, NUM_UNIFORMS), dtype=np.float32)
        given: dict[str, Array] = {PROBS: probs, UNIFORMS: uniforms, **fed(drafted, rng, vocab_size)}
        return {**given, DRAFT_PROBS: drafts} if name == BLOCK else given
    logits = rng.normal(0, rng.choice([0.3, 3.0]), (rows, vocab_size)).astype(np.float32)
    scalars = {TEMPERATURE: scalar(0.8), TOP_P: scalar(0.9), MIN_P: scalar(0.0)}
    chosen: dict[str, Array] = {LOGITS: logits, **scalars, TOP_K: np.array([0])}
    if name == NUCLEUS:
        filtered = sampler(FILTER, vocab_size).run(chosen)
        del chosen[TOP_K]
        chosen |= {key: filtered[key] for key in ("threshold", "nucleus_is_larger")}
    return chosen
