"""Slots that are used again: what is reused is exact and right, and nothing of an earlier sequence shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from specrt.engines.contract import LOGITS, past_name
from specrt.engines.fake import FakeEngine, FakeSampler, fake_spec
from specrt.runtime.model import KVCachedModel
from specrt.runtime.runtime import Runtime, load
from specrt.runtime.sampling.samplers import SamplerEngines
from specrt.runtime.settings import Settings
from specrt.runtime.slots import Slot, SlotModel
from tests.runtime.support.bundles import CONTEXT, TABLE, WAYS, Backend, K, Open, alone, num_slots, shown
from tests.runtime.support.fakes import POISON, Engine, cache_of, slot_of
from tests.runtime.support.plain import decode
from tests.runtime.support.tables import hashed

LONG = [(7 * i) % 60 for i in range(24)]
each_way = pytest.mark.parametrize("way", WAYS, ids=range(len(WAYS)))


# --- prefixes ------------------------------------------------------------------------------------------------------


@each_way
@pytest.mark.parametrize(
    ("second", "reused"),
    [
        (LONG, 23),  # all but the last token, whose row is needed
        (LONG[:10], 9),
        (LONG[:1], 0),
        ([*LONG[:10], 61], 10),
        ([*LONG[:10], 61, *LONG[11:]], 10),
        ([61, *LONG[1:]], 0),
        ([*LONG, 61], 24),
    ],
)
def test_a_prompt_reuses_what_it_shares_with_an_earlier_one(
    open_bundle: Open, runtime: Runtime, second: list[int], reused: int, way: dict[str, Any]
) -> None:
    runtime.generate(LONG, max_new_tokens=9, **{**way, "reproducible": True})
    result = runtime.generate(second, max_new_tokens=12, **way)
    assert result.stats.reused_prompt_tokens == reused
    assert shown(result) == alone(open_bundle, second, max_new_tokens=12, **way)


@each_way
def test_an_answer_is_part_of_what_is_reused(open_bundle: Open, runtime: Runtime, way: dict[str, Any]) -> None:
    """As in a chat: all of prompt and answer but the newest token, which was never fed."""
    answer = runtime.generate(LONG, max_new_tokens=9, **{**way, "reproducible": True}).token_ids
    turn = [*LONG, *answer, 5, 6]
    result = runtime.generate(turn, max_new_tokens=9, **way)
    assert result.stats.reused_prompt_tokens == len(LONG) + 8
    assert shown(result) == alone(open_bundle, turn, max_new_tokens=9, **way)


def test_the_slot_that_holds_most_of_the_prompt_is_taken(runtime: Runtime, models: Backend) -> None:
    """Three slots, because three streams are open at once; each of the later prompts finds the best."""
    prompts = [LONG, [*LONG[:12], *[9] * 6], [8] * 20]
    streams = [iter(runtime.stream(prompt, max_new_tokens=4)) for prompt in prompts]
    for pieces in streams:
        next(pieces)
    for pieces in reversed(streams):
        list(pieces)
    asked = [([*LONG, 1], 24), ([*LONG[:12], 9, 9, 1], 14), ([8] * 9, 8), ([*LONG[:20], 2], 20), ([8, 8, 8, 1], 3)]
    for prompt, reused in asked:
        assert runtime.generate(prompt, max_new_tokens=1).stats.reused_prompt_tokens == reused
    assert num_slots(models) == [3, 3]


@each_way
def test_a_prefix_is_copied_from_another_slot(open_bundle: Open, runtime: Runtime, way: dict[str, Any]) -> None:
    """The short text loses its slot; the long one keeps its own, and neither text changes."""
    way = {**way, "reproducible": True}
    streams = [runtime.stream(prompt, max_new_tokens=12, **way) for prompt in (LONG, [60, 59, 58, 57])]
    for stream in streams:
        next(stream.steps)
    for stream in streams:
        list(stream)
    prompts = [[*LONG[:12], 61, 62], [*LONG, *streams[0].token_ids, 5]]
    for prompt, reused in zip(prompts, (12, len(LONG) + 11), strict=True):
        result = runtime.generate(prompt, max_new_tokens=9, **way)
        assert result.stats.reused_prompt_tokens == reused
        assert shown(result) == alone(open_bundle, prompt, max_new_tokens=9, **way)
    assert runtime.num_idle_slots == 2


def test_what_was_read_narrowly_is_copied_as_such(runtime: Runtime) -> None:
    """Plain decoding of fifteen tokens after ten feeds fourteen of them one by one."""
    streams = [runtime.stream(prompt, max_new_tokens=15, draft="none") for prompt in (LONG[:10], [60, 59])]
    for stream in streams:
        next(stream.steps)
    for stream in streams:
        list(stream)
    text = [*LONG[:10], *streams[0].token_ids]
    asked = [
        ([*text, *LONG[:20]], {}, 24),
        ([*text[:17], 61, 62], {}, 17),
        ([*text[:17], 61, 63], {"reproducible": True}, 10),
    ]
    for prompt, options, reused in asked:  # the second one is copied: the first one is too long to lose
        result = runtime.generate(prompt, max_new_tokens=1, draft="none", **options)  # type: ignore[arg-type]
        assert result.stats.reused_prompt_tokens == reused
    assert runtime.generate([*text, *LONG[:20], 7], max_new_tokens=1).stats.reused_prompt_tokens == 45


@pytest.mark.parametrize("num_tokens", [1, 17, 40])
def test_a_copied_prefix_gives_the_same_bits(tiny_bundle: Path, num_tokens: int) -> None:
    """On a real engine, in target and draft, over an older text."""
    ids = [(7 * i) % 60 + 1 for i in range(44)]
    with load(tiny_bundle, threads=1) as runtime:
        source, slot = runtime.open_slot("self"), runtime.open_slot("self")
        assert source.draft is not None and slot.draft is not None
        for part, fed in ((source.target, ids), (source.draft, ids), (slot.target, [9] * 20), (slot.draft, [9] * 50)):
            part.model.feed(fed, 1)
        slot.copy_prefix(source, [*ids[:num_tokens], 63], 1)
        for one, other in ((source.target.model, slot.target.model), (source.draft.model, slot.draft.model)):
            assert other.kv_len == num_tokens
            one.rollback(num_tokens)
            rows = [model.feed([5, 6, 7], 3) and model.read(LOGITS)[0][:3].copy() for model in (one, other)]
            assert np.array_equal(rows[0], rows[1])
        source.close()
        slot.close()


def test_a_copied_prefix_is_not_shorter_than_the_one_it_replaces(tiny_bundle: Path) -> None:
    """Target and draft may have read different parts of a text: a round without the draft does not feed it."""
    ids = [(7 * i) % 60 + 1 for i in range(44)]
    with load(tiny_bundle, threads=1) as runtime:
        source, slot = runtime.open_slot("self"), runtime.open_slot("self")
        assert source.draft is not None and slot.draft is not None
        for part, num_tokens in ((source.target, 40), (source.draft, 5), (slot.target, 10), (slot.draft, 30)):
            part.model.feed(ids[:num_tokens], 1)
        slot.copy_prefix(source, ids, 1)
        assert (slot.target.model.kv_len, slot.draft.model.kv_len) == (40, 30)
        source.close()
        slot.close()


# --- passes of two rows --------------------------------------------------------------------------------------------


@dataclass
class Wide:
    """Which tokens' KV came from passes of two tokens or more, noted pass by pass."""

    tokens: list[int] = field(default_factory=list)
    is_wide: list[bool] = field(default_factory=list)

    def feed(self, ids: Sequence[int], widths: Sequence[int]) -> None:
        self.tokens += ids
        left = len(ids)
        for width in widths:
            self.is_wide += [width > 1] * min(width, left)
            left -= width

    def rollback(self, kv_len: int) -> None:
        del self.tokens[kv_len:], self.is_wide[kv_len:]

    def reusable(self, prompt: Sequence[int], min_width: int) -> int:
        count = 0
        while count < min(len(self.tokens), len(prompt) - 1) and self.tokens[count] == prompt[count]:
            if min_width > 1 and not self.is_wide[count]:
                break
            count += 1
        return count


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), st.lists(st.integers(0, 1), min_size=1, max_size=7), st.integers(1, 3)),
        st.tuples(st.just("back"), st.integers(0, 20), st.none()),
        st.tuples(st.just("begin"), st.lists(st.integers(0, 1), min_size=1, max_size=20), st.integers(1, 2)),
    ),
    max_size=12,
)


@hypothesis_settings(max_examples=300)
@given(STEPS, st.lists(st.integers(0, 1), max_size=25))
def test_a_reproducible_prompt_reuses_only_what_came_from_wide_passes(
    steps: list[tuple[str, Any, Any]], prompt: list[int]
) -> None:
    """Narrow passes among wide ones, rolled back and fed again, cut into passes of at most 4."""
    engine = Engine(replace(fake_spec(2, max_seq_len=200, k=4), max_width=4), hashed(1, 2))
    slot = slot_of(engine)
    model, wide = slot.model, Wide()
    for kind, given_ids, number in steps:
        engine.widths.clear()
        if kind == "feed":
            model.feed(given_ids, min(number, len(given_ids)))
            wide.feed(given_ids, engine.widths)
        elif kind == "back":
            wide.rollback(min(given_ids, model.kv_len))
            model.rollback(min(given_ids, model.kv_len))
        else:
            wide.rollback(wide.reusable(given_ids, number))
            slot.begin(given_ids, number)
        assert model.kv_len == len(wide.tokens)
        assert cache_of(model)[: model.kv_len].tolist() == wide.tokens
        for asked, least in product((prompt, wide.tokens, [*wide.tokens, 1]), (1, 2)):
            assert model.reusable(asked, least) == wide.reusable(asked, least)


@pytest.mark.parametrize(("first", "reused"), [({}, 10), ({"reproducible": True}, 23)])
def test_a_narrow_pass_of_another_request_is_not_reused_by_a_reproducible_one(
    runtime: Runtime, first: dict[str, Any], reused: int
) -> None:
    """Plain decoding of ten tokens feeds nine of them one by one."""
    answer = runtime.generate(LONG[:10], max_new_tokens=15, draft="none", **first).token_ids
    prompt = [*LONG[:10], *answer]
    assert runtime.generate(prompt[:24], max_new_tokens=1, seed=1).stats.reused_prompt_tokens == reused


@pytest.mark.parametrize("way", [{"seed": 1}, {"seed": 1, "temperature": 1.0}, {"reproducible": True}])
@pytest.mark.parametrize("length", [1, 8, 9, 10, CONTEXT - K - 2, CONTEXT - 2, CONTEXT - 1])
def test_no_pass_is_narrower_than_two_when_it_must_not_be(
    runtime: Runtime, models: Backend, way: dict[str, Any], length: int
) -> None:
    """To the last slot of the context, with chunks of 8 tokens; the draft's passes may be narrow."""
    prompt = [3] * length
    for k in range(K + 1):
        result = runtime.generate(prompt, max_new_tokens=99, num_speculative_tokens=k, **way)
        assert len(result.token_ids) == CONTEXT - length
    engine = models.engines["target"]
    assert min(engine.widths) >= 2 and min(engine.rows) >= 2
    assert max(engine.widths) <= engine.spec.max_width and max(engine.rows) <= engine.spec.max_rows
    settings = Settings(max_new_tokens=99, temperature=way.get("temperature", 0.0), seed=1)
    assert result.token_ids == decode(TABLE, settings, prompt, CONTEXT)


# --- stale slots ---------------------------------------------------------------------------------------------------


@each_way
def test_poison_in_stale_slots_changes_nothing(open_bundle: Open, models: Backend, way: dict[str, Any]) -> None:
    """After each piece, and so between two generations, everything beyond the committed tokens is overwritten."""
    expected = {length: alone(open_bundle, LONG[:length], max_new_tokens=20, **way) for length in (24, 5)}
    runtime = open_bundle()  # the latest, whose engines ``models`` has
    take, taken = runtime._pool.take, list[Slot]()
    runtime._pool.take = lambda *asked: taken.append(take(*asked)) or taken[-1]  # type: ignore[func-returns-value, method-assign]
    for length in (24, 5, 24, 5):
        stream = runtime.stream(LONG[:length], max_new_tokens=20, **way)
        for _ in stream:
            parts = [part.model for part in (taken[-1].target, taken[-1].draft) if part is not None]
            for model in parts:
                cache_of(model)[model.kv_len :] = POISON
        assert shown(stream.result) == expected[length]
    assert len(taken) == 4 and all(slot is taken[0] for slot in taken)
    assert (taken[0].draft is None) == (way.get("draft") in ("ngram", "none"))


# --- next to each other ---------------------------------------------------------------------------------------------


def requests() -> Iterator[tuple[list[int], dict[str, Any]]]:
    for index, way in enumerate(WAYS * 2):
        yield [*LONG[: 3 + index], index], {"max_new_tokens": 12 + index % 3, **way}


def test_interleaved_streams_answer_as_alone(open_bundle: Open, runtime: Runtime) -> None:
    streams = [runtime.stream(prompt, **options) for prompt, options in requests()]
    waiting = [iter(stream) for stream in streams]
    while waiting:
        waiting = [pieces for pieces in waiting if next(pieces, None) is not None]
    expected = [alone(open_bundle, prompt, **options) for prompt, options in requests()]
    assert [shown(stream.result) for stream in streams] == expected


def test_four_threads_answer_as_one(open_bundle: Open, runtime: Runtime, models: Backend) -> None:
    expected = [alone(open_bundle, prompt, **options) for prompt, options in requests()]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(3):
            running = [threads.submit(runtime.generate, prompt, **options) for prompt, options in requests()]
            assert [shown(future.result()) for future in running] == expected


def test_touching_a_slot_writes_each_byte_of_its_cache() -> None:
    """Else the system provides a page of a new cache at its first use, which is then a request's."""
    spec = fake_spec()
    model = KVCachedModel(FakeEngine(spec, lambda prefix: 0), spec)
    part = SlotModel(model, SamplerEngines(lambda name: FakeSampler(spec)))
    arrays = model.binding.host
    assert arrays[past_name("key", 0)].shape[2] == spec.capacity
    for array in arrays.values():
        array.view(np.uint8).fill(255)
    part.touch()
    assert not any(array.any() for array in arrays.values())
