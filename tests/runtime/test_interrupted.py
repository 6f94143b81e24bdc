"""Generations that end before their time, and those after them in the same slot."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from threading import Lock, Thread
from typing import Any

import pytest

from specrt.engines.interface import Array
from specrt.runtime.runtime import Runtime
from specrt.runtime.slots import Slot
from tests.runtime.support.bundles import DRAFT, PROMPT, WAYS, Backend, Open, alone, num_slots, shown
from tests.runtime.support.fakes import Engine

OPTIONS: list[dict[str, Any]] = [{"max_new_tokens": 16, **way} for way in WAYS]
OTHER = [*PROMPT[:3], *[9] * 10]
each_options = pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))


def test_every_kind_of_generation_after_every_other_answers_as_alone(open_bundle: Open, models: Backend) -> None:
    """Rules, filters, penalties and processors leave buffers and bindings behind, the draft's probabilities too."""
    expected = [alone(open_bundle, PROMPT, **options) for options in OPTIONS]
    runtime = open_bundle()
    for first in OPTIONS:
        for second, answer in zip(OPTIONS, expected, strict=True):
            runtime.generate(OTHER, **first)
            assert shown(runtime.generate(PROMPT, **second)) == answer
    assert num_slots(models) == [1, 1]


ALONE: dict[str, tuple[list[int], list[int]]] = {}  # what a runtime of its own answers, worked out once


def check_after(open_bundle: Open, runtime: Runtime, models: Backend, options: dict[str, Any]) -> None:
    """The slot is free, and later generations in it are right: the same request, whose prefix is reused, and others."""
    later = [(OTHER, options), (PROMPT, OPTIONS[4]), (OTHER, OPTIONS[0]), (PROMPT, options)]
    results = [shown(runtime.generate(prompt, **given)) for prompt, given in later]
    assert num_slots(models)[0] == 1
    for result, (prompt, given) in zip(results, later, strict=True):
        key = f"{prompt} {given}"
        if key not in ALONE:
            ALONE[key] = alone(open_bundle, prompt, **given)
        assert result == ALONE[key]


@each_options
@pytest.mark.parametrize("num_pieces", [1, 3])
def test_a_stream_closed_on_its_way_frees_its_slot(
    open_bundle: Open, runtime: Runtime, models: Backend, options: dict[str, Any], num_pieces: int
) -> None:
    stream = runtime.stream(OTHER, **options)
    pieces = iter(stream)
    for _ in range(num_pieces):
        next(pieces)
    stream.close()
    assert list(stream) == []
    check_after(open_bundle, runtime, models, options)


def test_a_stream_that_is_dropped_frees_its_slot(open_bundle: Open, runtime: Runtime, models: Backend) -> None:
    next(iter(runtime.stream(OTHER, **OPTIONS[2])))
    gc.collect()
    check_after(open_bundle, runtime, models, OPTIONS[2])


def test_a_stream_may_be_dropped_while_a_slot_is_taken(runtime: Runtime) -> None:
    """The collector runs whenever something is allocated: in the pool, too, which must not wait for itself."""
    opened = runtime._pool._open_slot

    def open_slot() -> Slot:
        gc.collect()
        return opened()

    gc.disable()
    next(iter(runtime.stream(OTHER)))
    runtime._pool._open_slot = open_slot
    thread = Thread(target=runtime.generate, args=(PROMPT,), kwargs={"max_new_tokens": 3}, daemon=True)
    thread.start()
    thread.join(timeout=5)
    waits_for_itself = thread.is_alive()
    gc.enable()
    if waits_for_itself:
        runtime._pool._lock = Lock()  # type: ignore[assignment]  # for the end of this test
    assert not waits_for_itself


def test_a_stream_closed_before_it_began_took_no_slot(runtime: Runtime, models: Backend) -> None:
    stream = runtime.stream(OTHER, **OPTIONS[0])
    stream.close()
    assert (list(stream), num_slots(models)) == ([], [0, 0])


class Failing:
    """The draft's table; raises in the call of number ``fails_at``."""

    def __init__(self) -> None:
        self.fails_at, self.num_calls = 0, 0

    def __call__(self, prefix: Sequence[int]) -> Array:
        self.num_calls += 1
        if self.num_calls == self.fails_at:
            raise OSError("the draft is gone")
        return DRAFT(prefix)


@pytest.mark.parametrize("options", OPTIONS[:5], ids=range(5))
@pytest.mark.parametrize("fails_at", [1, 3, 4, 6, 9])
def test_a_draft_that_raises_between_two_verdicts_leaves_a_slot_that_is_right(
    open_bundle: Open, models: Backend, options: dict[str, Any], fails_at: int
) -> None:
    """In its prefill (two chunks) or at a drafted id of a round, after earlier ones were accepted or not."""
    models.draft = failing = Failing()
    runtime = open_bundle()
    failing.fails_at = fails_at
    with pytest.raises(OSError, match="the draft is gone"):
        runtime.generate(OTHER, **options)
    assert failing.num_calls == fails_at
    check_after(open_bundle, runtime, models, options)


@each_options
@pytest.mark.parametrize("fails_at", [1, 2, 3, 5])
def test_a_pass_of_the_target_that_fails_leaves_a_slot_that_is_right(
    open_bundle: Open, models: Backend, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], fails_at: int
) -> None:
    """It has written KV already. The first and the second are the chunks of the prompt."""
    error = MemoryError if fails_at % 2 else KeyboardInterrupt
    runtime = open_bundle()
    engine, right, num_passes = models.engines["target"], Engine.compute, 0

    def compute(self: Engine, host: Mapping[str, Array], width: int, rows: int) -> None:
        nonlocal num_passes
        right(self, host, width, rows)
        num_passes += self is engine
        if self is engine and num_passes == fails_at:
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "compute", compute)
        with pytest.raises(error):
            runtime.generate(OTHER, **options)
    assert runtime._pool._idle[0].target.model.kv_len == 0, "it is unknown what was done of the round"
    check_after(open_bundle, runtime, models, options)
