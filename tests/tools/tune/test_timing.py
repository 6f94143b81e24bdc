"""Timed passes: turns, medians, and that a timed pass leaves the cache as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import specrt
from specrt.runtime.runtime import Runtime
from specrt.runtime.settings import Settings
from specrt.tools.tune import timing
from specrt.tools.tune.timing import medians_ms, time_draft, time_passes, time_target, verifying


def test_cases_take_turns_and_the_first_turn_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order = [0.0], []
    took = {"a": iter((9.0, 0.002, 0.001, 0.003)), "b": iter((9.0, 0.010, 0.500, 0.020))}
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])  # type: ignore[attr-defined]

    def run(name: str, seconds: Iterator[float]) -> None:
        order.append(name)
        now[0] += next(seconds)

    found = medians_ms({name: lambda n=name: run(n, took[n]) for name in took}, 3)  # type: ignore[misc]
    assert found == {"a": pytest.approx(2.0), "b": pytest.approx(20.0)}
    assert "".join(order) == "abababab"


@pytest.fixture(scope="module")
def runtime(tiny_bundle: Path) -> Iterator[Runtime]:
    with specrt.load(tiny_bundle, threads=1) as opened:
        yield opened


def test_every_width_and_every_draft_is_timed(runtime: Runtime) -> None:
    target, draft = time_target(runtime, 20, 2), time_draft(runtime, 20, 2, (1, 4, 64))
    assert (list(target), list(draft)) == ([1, 2, 3, 4, 5], [1, 4])
    assert min(*target.values(), *draft.values()) > 0
    target_ms, draft_ms = time_passes(runtime, 20, 1)
    assert len(target_ms) == 5 and draft_ms > 0


def test_a_past_beyond_the_context_is_cut_to_it(runtime: Runtime) -> None:
    assert len(time_target(runtime, 10**6, 1)) == 5


def test_a_timed_pass_verifies_after_the_same_past_each_time(runtime: Runtime) -> None:
    slot = runtime.open_slot("none")
    target, _ = runtime.begin(slot, [timing.FILLER] * 31, Settings())
    cases = verifying(target, 30, (1, 3))
    found = [cases[width]() for width in (3, 1, 3, 1, 1)]
    assert found[0] == found[2] and found[1] == found[3] == found[4]
    expected = runtime.generate([timing.FILLER] * 31, max_new_tokens=1, draft="none", ignore_eos=True).token_ids
    assert found[1] == (0, expected[0])
    slot.close()
