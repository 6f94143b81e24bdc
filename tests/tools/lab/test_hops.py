"""Hops of a round: calls from one file of specrt to another are counted, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from specrt.runtime.text.detokenizer import Stage, TextStream
from specrt.runtime.text.stops import StopWatch, checked_stops
from specrt.tools.lab.hops import greedy_round, hops_between


def test_calls_from_another_file_of_specrt_count() -> None:
    """Calls within a file do not, nor those of this file, which is none of specrt's."""
    watch = StopWatch(TextStream(str, [Stage()]))

    def run(cut: Callable[[], None]) -> None:
        cut()
        checked_stops("a")
        cut()
        watch.push(1)
        cut()

    pushed = ("specrt.runtime.text.stops", "specrt.runtime.text.detokenizer", "TextStream.push")
    assert hops_between(run) == [{}, {pushed: 1}]


def test_a_drafted_token_costs_six_hops_and_the_rest_of_a_round_twenty_one(tiny_bundle: Path) -> None:
    one, three = greedy_round(tiny_bundle, 1).total(), greedy_round(tiny_bundle, 3).total()
    assert (three - one, one - 6) == (2 * 6, 21)
