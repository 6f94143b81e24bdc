"""A model with its KV cache, on the fake engine: passes of bounded width, rollback, and what the cache can hold."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest

from specrt.engines.fake import FakeHead, fake_spec
from specrt.engines.interface import HostBinding
from specrt.runtime.drafting.head import HeadModel
from specrt.runtime.model import KVCachedModel
from tests.runtime.support.fakes import Engine, cache_of, continuation, engine_of, open_target, slot_of
from tests.runtime.support.tables import VOCAB_SIZE, hashed


@pytest.mark.parametrize(
    ("length", "rows", "widths"),
    [
        (7, 1, [7]),
        (8, 1, [8]),
        (9, 1, [8, 1]),
        (16, 1, [8, 8]),
        (17, 1, [8, 8, 1]),
        (7, 3, [7]),
        (8, 3, [8]),
        (9, 3, [6, 3]),
        (16, 3, [8, 8]),
        (17, 3, [8, 6, 3]),
        (8, 8, [8]),
        (9, 8, [1, 8]),
        (16, 8, [8, 8]),
        (17, 8, [8, 1, 8]),
    ],
)
@pytest.mark.parametrize("cached", [0, 1, 5])
def test_a_long_feed_is_cut_into_passes_that_leave_the_asked_rows_to_the_last(
    length: int, rows: int, widths: list[int], cached: int
) -> None:
    """Chunk 8; the fed tokens are the plain continuation, so each of the rows - 1 drafted ones is accepted."""
    next_token = hashed(15)
    engine = Engine(replace(fake_spec(VOCAB_SIZE, max_seq_len=64, k=7), max_width=8), next_token)
    target = open_target(engine)
    tokens = continuation(next_token, 30, prompt=[1])
    target.model.prefill(tokens[:cached])
    engine.widths.clear()
    end = cached + length
    committed, drafted = tokens[: end - rows + 1], tokens[end - rows + 1 : end]
    assert target.verify(committed, drafted) == (rows - 1, tokens[end])
    assert engine.widths == widths
    assert engine.rows[-1] == rows
    assert target.model.kv_len == end
    assert cache_of(target.model)[:end].tolist() == tokens[:end]


def test_no_pass_is_narrower_than_the_minimum() -> None:
    """A filler follows a token that is fed alone; it gets no place in the cache."""
    engine = engine_of(hashed(15))
    model = open_target(engine).model
    model.min_width = 2
    assert model.feed([3], 1) == (2, 2)
    assert (engine.widths, engine.rows, model.kv_len) == ([2], [2], 1)


def test_rollback_is_an_assignment_and_refuses_what_the_cache_does_not_hold() -> None:
    engine = engine_of(hashed(15))
    target = open_target(engine)
    model = target.model
    model.prefill([1, 2, 3, 4])
    for kv_len in (-1, 5):
        with pytest.raises(ValueError, match=f"rollback to {kv_len}, but the cache holds 4 tokens"):
            model.rollback(kv_len)
    model.rollback(4)
    model.rollback(2)
    assert (model.kv_len, cache_of(model)[:4].tolist(), engine.num_passes) == (2, [1, 2, 3, 4], 1)
    assert target.verify([1, 2, 9], []) == (0, hashed(15)([1, 2, 9]))


@pytest.mark.parametrize("num_drafted", [0, 1, 2])
@pytest.mark.parametrize("cached", [0, 3])
def test_feeding_nothing_before_the_drafts_is_refused(num_drafted: int, cached: int) -> None:
    engine = engine_of(hashed(15))
    target = open_target(engine)
    target.model.prefill([1] * cached)
    engine.widths.clear()
    expected = f"{num_drafted} tokens for {num_drafted + 1} rows after {cached} cached ones"
    with pytest.raises(ValueError, match=expected):
        target.verify([1] * cached, [2] * num_drafted)
    assert (engine.widths, target.model.kv_len) == ([], cached)


def test_a_feed_fits_up_to_the_last_slot_and_not_beyond() -> None:
    engine = engine_of(hashed(15), max_seq_len=32)
    target = open_target(engine)
    capacity = engine.spec.capacity
    target.model.prefill([1] * (capacity - 1))
    with pytest.raises(ValueError, match=f"a total of at most {capacity}"):
        target.verify([1] * (capacity + 1), [])
    assert target.verify([1] * capacity, []) == (0, hashed(15)([1] * capacity))


def test_prefilling_nothing_is_no_pass() -> None:
    engine = engine_of(hashed(15))
    slot_of(engine).model.prefill([])
    assert engine.num_passes == 0


def test_only_a_cache_on_the_host_without_features_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model with another's cache, a target with a head, or a device holds is more than its own memory."""
    engine = engine_of(hashed(1))
    model, other = (KVCachedModel(engine, engine.spec) for _ in range(2))
    model.feed([5, 6, 7], 1)
    assert model.can_copy and not KVCachedModel(engine, engine.spec, kv_owner=model).can_copy
    other.copy_prefix(model, 2)
    assert (other.kv_len, other.reusable([5, 6, 7, 8], 1), other.reusable([5, 6, 7, 8], 2)) == (2, 2, 2)
    other.feature_reader = Mock()
    assert not other.can_copy
    head_spec = replace(fake_spec(), feature_size=1, reads_features=True)
    assert not HeadModel(FakeHead(head_spec, lambda pairs: 0), head_spec).can_copy
    monkeypatch.setattr(HostBinding, "is_async", True)
    assert not model.can_copy
