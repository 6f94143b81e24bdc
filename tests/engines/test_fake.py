"""The fake backend: the match rule against a slow reference, and what the fake refuses."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from specrt.engines import numpy_samplers
from specrt.engines.contract import (
    INPUT_IDS,
    LOGITS,
    NUM_ACCEPTED,
    POSITION_IDS,
    ROW_INDICES,
    SEQLENS_K,
    TOKENS,
    TOTAL_SEQUENCE_LENGTH,
)
from specrt.engines.fake import FakeEngine, FakeSampler, fake_spec
from specrt.engines.interface import Array, Binding

SPEC = fake_spec(vocab_size=64, max_seq_len=32, k=4, max_width=8)


def next_token(prefix: Sequence[int]) -> int:
    """Depends on every token of the prefix and on their order."""
    return sum(place * token for place, token in enumerate(prefix, start=1)) % SPEC.vocab_size


def feed(binding: Binding, ids: Sequence[int], start: int, rows: Sequence[int] = (-1,)) -> None:
    """Fill the inputs for ``ids`` at positions ``start ..`` and run; negative rows count from the end."""
    width, host = len(ids), binding.host
    host[INPUT_IDS][0, :width] = ids
    host[POSITION_IDS][0, :width] = np.arange(start, start + width)
    host[SEQLENS_K][0] = start + width - 1
    host[TOTAL_SEQUENCE_LENGTH][0] = start + width
    host[ROW_INDICES][: len(rows)] = [row % width for row in rows]
    binding.run(width, len(rows))


def argmax(binding: Binding, rows: int) -> list[int]:
    tokens: list[int] = np.argmax(binding.host[LOGITS][:rows], axis=-1).tolist()
    return tokens


def match(logits: Array, row_ids: Array) -> tuple[Array, int]:
    """Tokens and accepted count of rows [R, V] that follow ``row_ids`` [R], by the reference."""
    tokens = numpy_samplers.greedy(logits)
    return tokens, numpy_samplers.match(tokens, row_ids[1:])


def slow_match(logits: Array, row_ids: Array) -> tuple[list[int], int]:
    """The rule as its definition reads, token by token."""
    tokens = [next(v for v, x in enumerate(row) if x == max(row)) for row in logits.tolist()]
    accepted = 0
    while accepted + 1 < len(tokens) and row_ids[accepted + 1] == tokens[accepted]:
        accepted += 1
    return tokens, accepted


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_match_equals_its_definition_on_every_small_case(num_rows: int) -> None:
    """Every logits table over {0, 1} with V = 2 or 3, ties included, with every choice of ids fed."""
    vocab_size = 3 if num_rows < 3 else 2
    for cells in itertools.product((0.0, 1.0), repeat=num_rows * vocab_size):
        logits = np.array(cells, np.float32).reshape(num_rows, vocab_size)  # [R, V]
        for ids in itertools.product(range(vocab_size), repeat=num_rows):
            tokens, accepted = match(logits, np.array(ids))
            assert (tokens.tolist(), accepted) == slow_match(logits, np.array(ids))


def test_match_takes_the_first_of_equal_maxima() -> None:
    tokens, _ = match(np.array([[1, 3, 3, 2], [5, 5, 5, 5]], np.float32), np.array([0, 0]))
    assert tokens.tolist() == [1, 0]


def test_match_of_one_row_accepts_none() -> None:
    tokens, accepted = match(np.array([[0, 1]], np.float32), np.array([1]))
    assert (tokens.tolist(), accepted) == ([1], 0)


@pytest.mark.parametrize(("drafted", "expected"), [([2, 3, 1], 3), ([2, 3, 0], 2), ([2, 0, 1], 1), ([0, 3, 1], 0)])
def test_match_counts_up_to_the_first_difference(drafted: list[int], expected: int) -> None:
    logits = np.eye(4, dtype=np.float32)[[2, 3, 1, 0]]  # [R, V]: the target's own tokens are 2, 3, 1, 0
    tokens, accepted = match(logits, np.array([9, *drafted]))
    assert (tokens.tolist(), accepted) == ([2, 3, 1, 0], expected)


def test_a_pass_of_many_rows_answers_as_passes_of_one() -> None:
    ids = [5, 9, 2, 7, 7]
    engine = FakeEngine(SPEC, next_token)
    one, many = engine.open(), engine.open()
    expected = []
    for start, token in enumerate(ids):
        feed(one, [token], start)
        expected += argmax(one, 1)
    feed(many, ids, 0, rows=range(5))
    assert argmax(many, 5) == expected == [next_token(ids[: n + 1]) for n in range(5)]
    assert engine.num_passes == 6


def test_stale_tokens_after_a_rollback_change_nothing() -> None:
    binding = FakeEngine(SPEC, next_token).open()
    feed(binding, [1, 2, 3, 4, 5], 0)
    feed(binding, [8, 9], 2)
    assert argmax(binding, 1) == [next_token([1, 2, 8, 9])]


def test_slots_keep_their_own_tokens() -> None:
    engine = FakeEngine(SPEC, next_token)
    first, second = engine.open(), engine.open()
    feed(first, [1, 2], 0)
    feed(second, [3, 4], 0)
    feed(first, [6], 2)
    assert argmax(first, 1) == [next_token([1, 2, 6])]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (POSITION_IDS, [4, 5, 6]),
        (POSITION_IDS, [3, 7, 5]),
        (POSITION_IDS, [3, 4, 4]),
        (SEQLENS_K, 6),
        (TOTAL_SEQUENCE_LENGTH, 2),
        (TOTAL_SEQUENCE_LENGTH, 7),
    ],
)
def test_positions_that_do_not_follow_the_cache_are_refused(name: str, value: int | list[int]) -> None:
    binding = FakeEngine(SPEC, next_token).open()
    feed(binding, [1, 2, 3], 0)
    feed(binding, [4, 5, 6], 3)
    buffer = binding.host[name]
    buffer[..., : np.size(value)] = value
    with pytest.raises(ValueError, match="do not follow"):
        binding.run(3, 1)


def test_a_pass_that_starts_before_the_first_position_is_refused() -> None:
    with pytest.raises(ValueError, match="do not follow -1 cached tokens"):
        feed(FakeEngine(SPEC, next_token).open(), [1, 2, 3], -1)


@pytest.mark.parametrize("row", [-1, 3])
def test_a_row_outside_the_pass_is_refused(row: int) -> None:
    binding = FakeEngine(SPEC, next_token).open()
    feed(binding, [1, 2, 3], 0)
    binding.host[ROW_INDICES][0] = row
    with pytest.raises(ValueError, match="row indices"):
        binding.run(3, 1)


def test_a_pass_wider_than_the_contract_is_refused() -> None:
    binding = FakeEngine(SPEC, next_token).open()
    binding.host[TOTAL_SEQUENCE_LENGTH][0] = SPEC.max_width + 1
    with pytest.raises(ValueError, match="do not follow"):
        binding.run(SPEC.max_width + 1, 1)


def test_a_closed_binding_does_not_run() -> None:
    binding = FakeEngine(SPEC, next_token).open()
    binding.close()
    binding.close()
    with pytest.raises(RuntimeError, match="closed"):
        binding.run(1, 1)


def verified(binding: Binding, **shared: Array) -> Binding:
    """The match sampler on the buffers of ``binding``."""
    return FakeSampler(SPEC).open({name: binding.host[name] for name in (LOGITS, INPUT_IDS, ROW_INDICES)})


def test_a_sampler_reads_the_pass_whose_buffers_it_shares() -> None:
    model = FakeEngine(SPEC, next_token).open()
    sampler = verified(model)
    first = next_token([7])
    second = next_token([7, first])
    wrong = (next_token([7, first, second]) + 1) % SPEC.vocab_size
    feed(model, [7, first, second, wrong], 0, rows=range(4))
    sampler.run(4, 4)
    assert sampler.host[NUM_ACCEPTED].tolist() == [2]
    assert sampler.host[TOKENS][:3].tolist() == [first, second, next_token([7, first, second])]


def test_a_sampler_for_one_row_reads_the_first_row_of_a_longer_buffer() -> None:
    model = FakeEngine(SPEC, next_token).open()
    shared = {name: model.host[name] for name in (LOGITS, INPUT_IDS, ROW_INDICES)}
    sampler = FakeSampler(replace(SPEC, max_rows=1)).open(shared)
    assert sampler.host[LOGITS] is model.host[LOGITS]
    assert sampler.host[TOKENS].shape == (1,)
    feed(model, [7, 8, 9], 0)
    sampler.run(3, 1)
    assert (sampler.host[TOKENS].tolist(), sampler.host[NUM_ACCEPTED].tolist()) == ([next_token([7, 8, 9])], [0])


@pytest.mark.parametrize("rows", [SPEC.max_rows - 1, 1])
def test_shared_memory_that_does_not_fit_is_refused(rows: int) -> None:
    sampler = FakeSampler(SPEC)
    with pytest.raises(ValueError, match="shared buffer logits: got float64"):
        sampler.open({LOGITS: np.zeros((SPEC.max_rows, SPEC.vocab_size))})
    with pytest.raises(ValueError, match=rf"shared buffer logits: got float32\[{rows}, 64\]"):
        sampler.open({LOGITS: np.zeros((rows, SPEC.vocab_size), np.float32)})


def test_ties_are_broken_at_random_where_a_test_asks_for_it() -> None:
    """Any of the largest is chosen, none else; a seed repeats the choices; the model's logits stay as they are."""
    tied = np.zeros((2, SPEC.vocab_size), np.float32)
    tied[0, [3, 9, 20]] = tied[1, [5]] = 1.5

    def drawn(ties: np.random.Generator | None) -> list[tuple[int, int]]:
        sampler = FakeSampler(SPEC, ties=ties).open()
        sampler.host[LOGITS][:2], sampler.host[ROW_INDICES][:2] = tied, [0, 1]
        found = []
        for _ in range(40):
            sampler.run(2, 2)
            found.append((int(sampler.host[TOKENS][0]), int(sampler.host[TOKENS][1])))
            assert np.array_equal(sampler.host[LOGITS][:2], tied)
        return found

    assert set(drawn(None)) == {(3, 5)}
    assert set(drawn(np.random.default_rng(1))) == {(3, 5), (9, 5), (20, 5)}
    assert drawn(np.random.default_rng(1)) == drawn(np.random.default_rng(1))
