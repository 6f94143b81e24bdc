"""ONNX Runtime behind the interface, on a model of one layer: what a pass answers, its memory, its slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from specrt.engines.contract import (
    INPUT_IDS,
    LOGITS,
    NUM_ACCEPTED,
    POSITION_IDS,
    ROW_INDICES,
    SEQLENS_K,
    TOKENS,
    TOTAL_SEQUENCE_LENGTH,
    model_contract,
    plan_buffers,
)
from specrt.engines.interface import Array, Binding
from specrt.engines.ort.cpu import OrtBinding, OrtEngine
from specrt.engines.samplers import MATCH, sampler_contract
from specrt.exporter.samplers import sampler_graph
from tests.engines.ort.attention_model import KEY, SPEC, VALUE, logits_without_cache, make_model, match_sampler


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    onnx.save(make_model(), path)
    return path


@pytest.fixture(scope="module")
def engine(graph: Path) -> OrtEngine:
    return OrtEngine(graph, model_contract(SPEC), threads=1)


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> OrtEngine:
    return match_sampler(tmp_path_factory.mktemp("samplers"))


@pytest.fixture
def binding(engine: OrtEngine) -> Any:
    binding = engine.open()
    yield binding
    binding.close()


def feed(binding: Binding, ids: Sequence[int], start: int, rows: int = 1) -> Array:
    """Run one pass of ``ids`` at positions ``start ..``; a copy of the logits of its last ``rows`` rows. [R, V]"""
    width, host = len(ids), binding.host
    host[INPUT_IDS][0, :width] = ids
    host[POSITION_IDS][0, :width] = np.arange(start, start + width)
    host[SEQLENS_K][0], host[TOTAL_SEQUENCE_LENGTH][0] = start + width - 1, start + width
    host[ROW_INDICES][:rows] = np.arange(width - rows, width)
    binding.run(width, rows)
    logits: Array = host[LOGITS][:rows].copy()
    return logits


def some_ids(count: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, SPEC.vocab_size, count).tolist()
    return ids


# --- what a pass answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("past", [0, 1, 5, 70])
@pytest.mark.parametrize("rows", [1, 2, 3, 9])
def test_one_pass_of_rows_is_as_many_passes_of_one_and_the_model_without_cache(
    engine: OrtEngine, past: int, rows: int
) -> None:
    ids = some_ids(past + rows)
    many, single = engine.open(), engine.open()
    try:
        if past:
            feed(many, ids[:past], 0)
        together = feed(many, ids[past:], past, rows)
        one_by_one = np.concatenate([feed(single, [token], place) for place, token in enumerate(ids)])
        np.testing.assert_allclose(together, one_by_one[past:], atol=1e-5)
        np.testing.assert_allclose(together, logits_without_cache(ids)[past:], atol=1e-5)
        np.testing.assert_allclose(many.host[KEY], single.host[KEY], atol=1e-5)
    finally:
        many.close()
        single.close()


def test_rows_are_those_asked_for(binding: OrtBinding) -> None:
    ids = some_ids(12)
    expected = logits_without_cache(ids)[[3, 7, 11]]
    feed(binding, ids, 0)
    binding.host[ROW_INDICES][:3] = [3, 7, 11]
    binding.run(12, 3)
    np.testing.assert_allclose(binding.host[LOGITS][:3], expected, atol=1e-5)


def test_stale_slots_are_overwritten_and_never_read(binding: OrtBinding) -> None:
    ids = some_ids(10)
    feed(binding, ids, 0)
    for name in (KEY, VALUE):
        binding.host[name][:, :, 4:] = 1e4
    np.testing.assert_allclose(feed(binding, ids[4:7], 4, 3), logits_without_cache(ids[:7])[4:], atol=1e-5)
    assert (binding.host[KEY][:, :, :7] < 1e3).all()
    assert (binding.host[KEY][:, :, 7:] == 1e4).all()


def test_two_slots_of_one_engine_do_not_disturb_each_other(engine: OrtEngine) -> None:
    """Turn by turn, with different lengths and widths."""
    sequences = [some_ids(24, seed=1), some_ids(40, seed=2)]
    bindings = [engine.open() for _ in range(2)]
    try:
        for turn in range(8):
            for binding, ids, width in zip(bindings, sequences, (3, 5), strict=True):
                start = turn * width
                expected = logits_without_cache(ids[: start + width])[start:]
                np.testing.assert_allclose(feed(binding, ids[start:][:width], start, width), expected, atol=1e-5)
    finally:
        for binding in bindings:
            binding.close()


# --- memory --------------------------------------------------------------------------------------------------------


def test_kv_is_appended_in_place(binding: OrtBinding) -> None:
    """Only the slots of the fed positions change, in the very buffer that the past is read from."""
    before = {name: binding.host[name].copy() for name in (KEY, VALUE)}
    for start, width in ((0, 3), (3, 1), (4, 6)):
        feed(binding, some_ids(width), start)
        for name in (KEY, VALUE):
            changed = (binding.host[name] != before[name]).any(axis=(0, 1, 3))  # [capacity]
            assert np.flatnonzero(changed).tolist() == list(range(start, start + width))
            before[name] = binding.host[name].copy()


def test_buffers_stay_where_they_are_and_are_those_of_the_plan(binding: OrtBinding) -> None:
    plan = plan_buffers(model_contract(SPEC))
    assert {name: (array.shape, str(array.dtype)) for name, array in binding.host.items()} == {
        buffer.name: (buffer.shape, buffer.dtype) for buffer in plan
    }
    addresses = {name: array.ctypes.data for name, array in binding.host.items()}
    assert all(address % 64 == 0 for address in addresses.values())
    for width, rows in ((1, 1), (9, 9), (72, 1), (9, 9)):
        feed(binding, some_ids(width), 0, rows)
    assert {name: array.ctypes.data for name, array in binding.host.items()} == addresses


def test_logits_are_written_into_the_host_s_buffer_and_no_further_than_the_rows(binding: OrtBinding) -> None:
    binding.host[LOGITS][:] = 7.0
    feed(binding, some_ids(4), 0, 2)
    assert (binding.host[LOGITS][:2] != 7.0).any(axis=1).all()
    assert (binding.host[LOGITS][2:] == 7.0).all()


@pytest.fixture
def made(engine: OrtEngine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The session's bindings as they are made."""
    bindings: list[Any] = []
    make: Callable[[], Any] = engine.session.io_binding

    def noted() -> Any:
        bindings.append(make())
        return bindings[-1]

    monkeypatch.setattr(engine.session, "io_binding", noted)
    return bindings


def test_a_width_seen_before_is_not_bound_again(made: list[Any], binding: OrtBinding) -> None:
    widths = [(1, 1), (5, 5), (9, 9), (5, 1), (OrtBinding.KEPT_WIDTHS, 1)]
    for width, rows in widths:
        feed(binding, some_ids(width), 0, rows)
    assert len(made) == len(widths)
    for width, rows in widths * 3:
        feed(binding, some_ids(width), 0, rows)
    assert len(made) == len(widths)


def test_odd_widths_of_a_long_prompt_are_not_kept(made: list[Any], binding: OrtBinding) -> None:
    width = OrtBinding.KEPT_WIDTHS + 1
    expected = logits_without_cache(some_ids(width))[-1:]
    for _ in range(2):
        np.testing.assert_allclose(feed(binding, some_ids(width), 0), expected, rtol=1e-5, atol=1e-5)
    assert len(made) == 2


def test_a_sampler_reads_the_model_s_own_buffers(engine: OrtEngine, sampler: OrtEngine) -> None:
    """A pass whose drafted ids are the model's own tokens except for the last; the sampler's output must match them."""
    model = engine.open()
    shared = {name: model.host[name] for name in (LOGITS, INPUT_IDS, ROW_INDICES)}
    verifier = sampler.open(shared)
    try:
        assert all(verifier.host[name] is array for name, array in shared.items())
        ids = some_ids(6)
        for _ in range(3):
            ids.append(int(np.argmax(logits_without_cache(ids)[-1])))
        own = np.argmax(logits_without_cache(ids), axis=-1)
        ids[-1] = (ids[-1] + 1) % SPEC.vocab_size
        feed(model, ids, 0, 4)
        verifier.run(len(ids), 4)
        assert verifier.host[NUM_ACCEPTED].tolist() == [2]
        assert verifier.host[TOKENS][:3].tolist() == own[5:8].tolist()
    finally:
        verifier.close()
        model.close()


def test_a_sampler_for_one_row_reads_the_first_row_of_the_model_s_buffers(engine: OrtEngine, tmp_path: Path) -> None:
    one_row = replace(SPEC, max_rows=1)
    onnx.save(sampler_graph(MATCH, one_row, SPEC.vocab_size), tmp_path / "match.onnx")
    model = engine.open()
    verifier = OrtEngine(tmp_path / "match.onnx", sampler_contract(MATCH, one_row, SPEC.vocab_size), threads=1).open(
        model.host
    )
    try:
        assert verifier.host[LOGITS] is model.host[LOGITS]
        assert verifier.host[TOKENS].shape == (1,)
        for count in (1, 3, 8):
            ids = some_ids(count)
            feed(model, ids, 0)
            verifier.run(count, 1)
            assert verifier.host[TOKENS].tolist() == [int(np.argmax(logits_without_cache(ids)[-1]))]
            assert verifier.host[NUM_ACCEPTED].tolist() == [0]
        with pytest.raises(ValueError, match="pass of 2 tokens and 2 rows: at most 72 and 1"):
            verifier.run(2, 2)
    finally:
        verifier.close()
        model.close()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((SPEC.max_rows, SPEC.vocab_size)),
        np.zeros((SPEC.max_rows - 1, SPEC.vocab_size), np.float32),
        np.zeros((SPEC.max_rows, SPEC.vocab_size + 1), np.float32),
        np.zeros((SPEC.max_rows, 2 * SPEC.vocab_size), np.float32)[:, ::2],
        np.zeros((2 * SPEC.max_rows, SPEC.vocab_size), np.float32)[::2],
    ],
    ids=["dtype", "fewer rows", "wider rows", "columns not contiguous", "rows not contiguous"],
)
def test_shared_memory_that_does_not_fit_is_refused(sampler: OrtEngine, array: Array) -> None:
    with pytest.raises(ValueError, match=r"shared buffer logits: got .*, expected contiguous float32\[9, 32\]"):
        sampler.open({LOGITS: array})


# --- slots and misuse ----------------------------------------------------------------------------------------------


def test_a_new_slot_starts_empty(engine: OrtEngine) -> None:
    first = engine.open()
    feed(first, some_ids(9), 0)
    first.close()
    second = engine.open()
    assert not any(array.any() for array in second.host.values())
    second.close()


@pytest.mark.parametrize("num_runs", [0, 1])
def test_a_closed_binding_does_not_run(engine: OrtEngine, num_runs: int) -> None:
    binding = engine.open()
    for _ in range(num_runs):
        feed(binding, [1], 0)
    binding.close()
    binding.close()
    with pytest.raises(RuntimeError, match="this binding is closed"):
        binding.run(1, 1)
    assert dict(binding.host) == {}


@pytest.mark.parametrize(("width", "rows"), [(0, 1), (1, 0), (-1, 1), (SPEC.max_width + 1, 1), (20, SPEC.max_rows + 1)])
def test_a_pass_beyond_the_limits_is_refused(binding: OrtBinding, width: int, rows: int) -> None:
    with pytest.raises(ValueError, match=f"pass of {width} tokens and {rows} rows: at most 72 and 9"):
        binding.run(width, rows)
