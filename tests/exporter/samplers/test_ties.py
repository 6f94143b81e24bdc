"""The first of equal values is taken, for any choice by ArgMax and TopK; tested with kernels that vary it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from specrt.engines import numpy_samplers
from specrt.engines.contract import LOGITS, NUM_ACCEPTED, TOKENS
from specrt.engines.fake import fake_spec
from specrt.engines.interface import Array
from specrt.engines.ort.cpu import session_options
from specrt.engines.samplers import (
    CHOSEN_IDS,
    LOGPROBS,
    MATCH,
    MAX_TOP_LOGPROBS,
    SAMPLER_NAMES,
    TOP_IDS,
    TOP_LOGPROBS,
)
from specrt.exporter.samplers import sampler_graph
from tests.exporter.samplers.random_ties import with_random_ties
from tests.exporter.samplers.samplers_on_ort import MAX_K, VOCAB_SIZES, fed, seeds

NUM_SEEDS = 3


@cache
def session(name: str, vocab_size: int, seed: int) -> Any:
    model = with_random_ties(sampler_graph(name, fake_spec(vocab_size, k=MAX_K), vocab_size), seed)
    return ort.InferenceSession(model.SerializeToString(), session_options(1, True), providers=["CPUExecutionProvider"])


def tied_logits(rng: np.random.Generator, rows: int, vocab_size: int) -> Array:
    """Few distinct values, as fp16 gives them; some rows are one value, and some -inf throughout."""
    logits = rng.integers(0, int(rng.integers(1, 5)), (rows, vocab_size)).astype(np.float32)
    logits[rng.random(rows) < 0.2] = -np.inf
    return logits


@given(seeds, st.sampled_from(VOCAB_SIZES), st.integers(0, NUM_SEEDS - 1))
def test_match_names_the_first_id_and_the_first_miss(seed: int, vocab_size: int, order: int) -> None:
    rng = np.random.default_rng(seed)
    logits = tied_logits(rng, int(rng.integers(1, MAX_K + 2)), vocab_size)
    expected = numpy_samplers.greedy(logits)
    drafted = np.where(rng.random(len(logits) - 1) < 0.7, expected[:-1], rng.integers(0, vocab_size, len(logits) - 1))
    outputs = [TOKENS, NUM_ACCEPTED]
    tokens, accepted = session(MATCH, vocab_size, order).run(outputs, {LOGITS: logits, **fed(drafted, rng, vocab_size)})
    assert tokens.tolist() == expected.tolist()
    assert accepted.tolist() == [numpy_samplers.match(expected, drafted)]


@given(seeds, st.sampled_from(VOCAB_SIZES), st.integers(0, NUM_SEEDS - 1))
def test_logprobs_name_the_first_of_equals(seed: int, vocab_size: int, order: int) -> None:
    rng = np.random.default_rng(seed)
    logits = tied_logits(rng, 3, vocab_size)
    logits[~np.isfinite(logits)] = 0.0
    given_ids = {LOGITS: logits, CHOSEN_IDS: np.zeros(3, np.int64)}
    values, ids = session(LOGPROBS, vocab_size, order).run([TOP_LOGPROBS, TOP_IDS], given_ids)
    count = min(MAX_TOP_LOGPROBS, vocab_size)
    assert ids.tolist() == np.argsort(-logits, axis=-1, kind="stable")[:, :count].tolist()
    assert np.allclose(values, numpy_samplers.logprobs(logits, np.zeros(3, np.int64), count)[1], atol=2e-6)


def test_a_row_that_is_not_a_number_names_an_id() -> None:
    """No id is right; one beyond the vocabulary would be read out of memory that is not there."""
    for vocab_size in VOCAB_SIZES:
        logits = np.full((1, vocab_size), np.nan, np.float32)
        inputs = {LOGITS: logits, **fed(np.zeros(0, np.int64), np.random.default_rng(0), vocab_size)}
        (tokens,) = session(MATCH, vocab_size, 0).run([TOKENS], inputs)
        assert 0 <= tokens[0] < vocab_size


def test_no_sampler_depends_on_which_of_equal_values_argmax_returns() -> None:
    """TopK returns values, and ids that are sorted afterwards."""
    for name in SAMPLER_NAMES:
        operators = {node.op_type for node in sampler_graph(name, fake_spec(320), 320).graph.node}
        assert not operators & {"ArgMax", "ArgMin"}, name


@pytest.mark.parametrize(("operator", "inputs"), [("ArgMax", ["x"]), ("TopK", ["x", "k"])])
def test_the_kernels_of_these_tests_name_any_of_equals(operator: str, inputs: list[str]) -> None:
    """The control: without it each of the tests above might pass by luck."""
    outputs = ["found"] if operator == "ArgMax" else ["values", "found"]
    node = helper.make_node(operator, inputs, outputs, name="n", axis=-1)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["R", 8])],
        [helper.make_tensor_value_info("found", TensorProto.INT64, ["R", 1])],
        [helper.make_tensor("k", TensorProto.INT64, [1], [1])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    x = np.array([[1, 5, 5, 0, 5, 5, 2, 5]], np.float32)
    found = set()
    for seed in range(16):
        changed = with_random_ties(model, seed).SerializeToString()
        (ids,) = ort.InferenceSession(changed, providers=["CPUExecutionProvider"]).run(["found"], {"x": x})
        assert x[0, ids[0, 0]] == 5
        found.add(int(ids[0, 0]))
    assert len(found) > 1
