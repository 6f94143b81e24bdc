"""What holds of every sampler: its contract, operators that TensorRT-RTX takes, and rows that do not see each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from specrt.engines import numpy_samplers
from specrt.engines.contract import INPUT_IDS, LOGITS, NUM_ACCEPTED, ROW_INDICES, TOKENS
from specrt.engines.fake import fake_spec
from specrt.engines.interface import Array
from specrt.engines.ort.cpu import OrtEngine
from specrt.engines.samplers import (
    BLOCK,
    CHOSEN_IDS,
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
    MIN_P,
    NUCLEUS,
    NUCLEUS_IS_LARGER,
    NUM_UNENDING_ROWS,
    NUM_UNIFORMS,
    OUTPUT_COUNTS,
    PENALTIES,
    PRESENCE_PENALTY,
    PROBS,
    REPETITION_PENALTY,
    SAMPLER_NAMES,
    SOFTMAX,
    TEMPERATURE,
    THRESHOLD,
    TOP_K,
    TOP_P,
    UNIFORMS,
    sampler_contract,
)
from specrt.exporter.samplers import sampler_graph
from tests.exporter.samplers.samplers_on_ort import MAX_K, sampler

VOCAB_SIZES = [7, 1500, 2053]
PAIRS = [(7, 7), (7, 5), (5, 7), (1500, 1500), (900, 1500), (1500, 900), (151_936, 151_936)]
REFUSED = {
    *("ScatterND", "NonZero", "Unique", "Compress", "CumProd", "BitwiseXor"),
    *("Loop", "If", "Scan", "RandomUniform", "RandomUniformLike", "RandomNormal", "Multinomial", "Bernoulli"),
}
MOST_SORTED = 3840
each_sampler = pytest.mark.parametrize("name", SAMPLER_NAMES)


# --- graphs --------------------------------------------------------------------------------------------------------


def graphs(name: str) -> Iterator[Any]:
    """With inferred shapes, for vocabularies of every kind."""
    for vocab_size, target in PAIRS:
        yield onnx.shape_inference.infer_shapes(
            sampler_graph(name, fake_spec(vocab_size), target), strict_mode=True
        ).graph


@each_sampler
def test_no_operator_is_one_that_tensorrt_refuses(name: str) -> None:
    for graph in graphs(name):
        assert {node.op_type for node in graph.node} & REFUSED == set()
        assert {node.domain for node in graph.node} <= {"", "ai.onnx"}
        scattering = [node for node in graph.node if node.op_type == "ScatterElements"]
        assert all(attribute.name != "reduction" for node in scattering for attribute in node.attribute)


@each_sampler
def test_few_ids_are_sorted_and_k_is_a_constant(name: str) -> None:
    for graph in graphs(name):
        constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
        for node in graph.node:
            if node.op_type == "TopK":
                assert constants[node.input[1]].item() <= MOST_SORTED


@each_sampler
def test_argmax_never_sees_one_dimension(name: str) -> None:
    for graph in graphs(name):
        infos = [*graph.input, *graph.value_info, *graph.output]
        ranks = {info.name: len(info.type.tensor_type.shape.dim) for info in infos}
        assert all(ranks[node.input[0]] == 2 for node in graph.node if node.op_type == "ArgMax")


def test_an_unknown_sampler_is_refused() -> None:
    with pytest.raises(ValueError, match="sampler: got 'typical', expected one of match, penalties, "):
        sampler_graph("typical", fake_spec(), 64)


@each_sampler
@pytest.mark.parametrize(("vocab_size", "target"), PAIRS[:3])
def test_the_engine_takes_each_head_and_runs_it_with_all_rows_and_with_one(
    name: str, vocab_size: int, target: int, tmp_path: Path
) -> None:
    spec = fake_spec(vocab_size, k=3)
    onnx.save(sampler_graph(name, spec, target), tmp_path / "sampler.onnx")
    binding = OrtEngine(tmp_path / "sampler.onnx", sampler_contract(name, spec, target), threads=1).open()
    for array in binding.host.values():
        array[...] = 1
    for rows in (4, 1, 4):
        binding.host.get(ROW_INDICES, np.zeros(4))[:rows] = np.arange(rows)
        binding.run(rows + 1, rows)


def test_samplers_are_chained_through_their_buffers(tmp_path: Path) -> None:
    """Logits, filter, nucleus into the filter's own probabilities, then block; on a vocabulary that needs all of it."""
    vocab_size, k = 1500, 4
    spec, rng = fake_spec(vocab_size, k=k), np.random.default_rng(0)
    bindings = {}
    shared: dict[str, Array] = {}
    for name in (FILTER, FILTER_WIDE, NUCLEUS, BLOCK):
        onnx.save(sampler_graph(name, spec, vocab_size), tmp_path / f"{name}.onnx")
        contract = sampler_contract(name, spec, vocab_size)
        own = {t.name: shared[t.name] for t in (*contract.inputs, *contract.outputs) if t.name in shared}
        bindings[name] = OrtEngine(tmp_path / f"{name}.onnx", contract, threads=1).open(own)
        shared.update(bindings[name].host)
    logits = rng.normal(0, 0.3, (k + 1, vocab_size)).astype(np.float32)
    p = numpy_samplers.filtered(logits, 0.8, 0, 0.95)
    q = numpy_samplers.softmax(logits[:k] + 1, 0.8)
    drafted = np.array([numpy_samplers.draw(row, rng.random(), rng.random()) for row in q])
    uniforms = rng.random((k + 1, NUM_UNIFORMS), dtype=np.float32)
    scalars = {TEMPERATURE: 0.8, TOP_K: 0, TOP_P: 0.95, MIN_P: 0}
    for name, value in (scalars | {LOGITS: logits, UNIFORMS: uniforms, ROW_INDICES: np.arange(k + 1)}).items():
        shared[name][...] = value
    shared[INPUT_IDS][0, 1 : k + 1] = drafted
    shared[DRAFT_PROBS][:k] = q
    for binding in bindings.values():
        binding.run(k + 1, k + 1)
    assert shared[NUCLEUS_IS_LARGER].all()
    expected = numpy_samplers.block(p, q, drafted, uniforms[:k, 0], (uniforms[0, 1], uniforms[0, 2]))
    assert (shared[NUM_ACCEPTED][0], shared[TOKENS][0]) == expected


# --- rows ----------------------------------------------------------------------------------------------------------


def rows_inputs(name: str, vocab_size: int) -> dict[str, Array]:
    """Inputs of a sampler whose outputs are by row, with MAX_K + 1 rows."""
    rng, rows = np.random.default_rng(vocab_size), MAX_K + 1
    logits = rng.normal(0, 0.7, (rows, vocab_size)).astype(np.float32)
    logits[::2] *= 0.1  # rows of a large nucleus
    by_id = {key: rng.poisson(0.5, vocab_size).astype(np.float32) for key in (CONTEXT_COUNTS, OUTPUT_COUNTS)}
    by_id |= {key: rng.normal(size=vocab_size).astype(np.float32) for key in (LOGIT_BIAS, ENDING_LIMIT)}
    scalars = {TEMPERATURE: 0.7, TOP_P: 0.95, MIN_P: 0.01, REPETITION_PENALTY: 1.3, PRESENCE_PENALTY: 0.3}
    inputs: dict[str, Array] = {
        LOGITS: logits,
        INPUT_IDS: rng.integers(0, vocab_size, (1, rows)),
        ROW_INDICES: np.arange(rows),
        CHOSEN_IDS: rng.integers(0, vocab_size, rows),
        PROBS: numpy_samplers.softmax(logits, 1.0),
        UNIFORMS: rng.random((rows, NUM_UNIFORMS), dtype=np.float32),
        **by_id,
        **{key: np.array([value], np.float32) for key, value in (scalars | {FREQUENCY_PENALTY: 0.1}).items()},
        TOP_K: np.array([0]),
        NUM_UNENDING_ROWS: np.array([2]),
    }
    if name == NUCLEUS:
        given = {key: inputs[key] for key in (LOGITS, TEMPERATURE, TOP_K, TOP_P, MIN_P)}
        inputs |= sampler(FILTER_WIDE, vocab_size).run(given)
    wanted = {tensor.name for tensor in sampler(name, vocab_size).contract.inputs}
    return {key: value for key, value in inputs.items() if key in wanted}


@pytest.mark.parametrize(("vocab_size", "threads"), [(7, 2), (1500, 2), (2053, 2), (49_152, 1), (49_152, 2)])
@pytest.mark.parametrize("name", [MATCH, PENALTIES, SOFTMAX, FILTER, FILTER_WIDE, NUCLEUS, MATCH_SAMPLED, LOGPROBS])
def test_a_row_is_bit_identical_for_any_other_rows(name: str, vocab_size: int, threads: int) -> None:
    """In the reproducible mode a row verified alone must equal the row among others."""
    inputs, one = rows_inputs(name, vocab_size), sampler(name, vocab_size, threads=threads)
    by_row = {LOGITS, ROW_INDICES, CHOSEN_IDS, PROBS, UNIFORMS, THRESHOLD, NUCLEUS_IS_LARGER}
    whole = one.run(inputs)
    for rows in range(1, MAX_K + 1):
        fewer = one.run({key: value[:rows] if key in by_row else value for key, value in inputs.items()})
        for key, value in fewer.items():
            if key == NUM_ACCEPTED:
                assert value[0] == min(whole[key][0], rows - 1)
            else:
                np.testing.assert_array_equal(value, whole[key][:rows], err_msg=f"{key}, {rows} rows")


@pytest.mark.parametrize("vocab_size", [*VOCAB_SIZES, 49_152])
def test_rows_beyond_the_verified_ones_change_nothing(vocab_size: int) -> None:
    """A draft whose last ids have target probability 0: ``block`` cannot accept them either, and both stop there."""
    rng = np.random.default_rng(vocab_size)
    p = numpy_samplers.softmax(rng.normal(size=(MAX_K + 1, vocab_size)).astype(np.float32), 1.0)
    q = numpy_samplers.softmax(rng.normal(size=(MAX_K + 1, vocab_size)).astype(np.float32), 1.0)
    ids, uniforms = rng.integers(0, vocab_size, (1, MAX_K + 1)), rng.random((MAX_K + 1, NUM_UNIFORMS), dtype=np.float32)
    p[1, ids[0, 2]] = 0
    uniforms[0, 0] = 0
    results = []
    for rows in range(3, MAX_K + 2):
        given = {PROBS: p[:rows], DRAFT_PROBS: q[:rows], UNIFORMS: uniforms[:rows]}
        outputs = sampler(BLOCK, vocab_size).run({**given, INPUT_IDS: ids, ROW_INDICES: np.arange(rows)})
        results.append((outputs[NUM_ACCEPTED][0], outputs[TOKENS][0]))
    assert results[0][0] == 1
    assert set(results) == {results[0]}
