"""Times of passes: between those seen on a line, beyond them by the slope, and always after the newest."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrt.engines.experts import Experts
from specrt.runtime.drafting.latency import LatencyModel

MS = st.floats(0.01, 1e4)
NUM_SHARED = 3  # models that four threads use


def test_nothing_is_known_at_first() -> None:
    assert not LatencyModel(0.05).is_known
    assert LatencyModel(0.05, {1: 2.0}).is_known


def test_widths_between_two_seen_is_on_a_line_and_those_beyond_on_the_slope() -> None:
    costs = LatencyModel(0.5, {2: 15.0, 4: 25.0})
    assert [costs.ms(width) for width in (1, 2, 3, 4, 6)] == [10.0, 15.0, 20.0, 25.0, pytest.approx(35.0)]


def test_what_a_wider_pass_reads_more_counts_until_it_is_measured() -> None:
    experts = Experts(num_layers=1, num_experts=8, experts_per_token=2, bytes_per_expert=50)
    costs = LatencyModel(0.05, {1: 10.0}, lambda width: experts.further_bytes(width) / 100)
    assert costs.ms(2) == pytest.approx(10 * (1 + 0.05 + 0.75))
    costs.observe(2, 11.0)
    assert costs.ms(2) < 18 and costs.ms(9) > 30
    assert LatencyModel(0.05, {1: 10.0}).ms(2) == pytest.approx(10.5)


@given(st.floats(0, 1), st.dictionaries(st.integers(1, 9), MS, min_size=1), st.integers(1, 300))
def test_every_width_has_a_positive_time(slope: float, measured: dict[int, float], width: int) -> None:
    assert LatencyModel(slope, measured).ms(width) > 0


@given(MS, MS, st.integers(1, 9))
def test_the_estimate_comes_to_what_is_observed(first: float, later: float, width: int) -> None:
    costs = LatencyModel(0.05)
    costs.observe(width, first)
    assert costs.ms(width) == first
    for _ in range(200):
        costs.observe(width, later)
    assert costs.ms(width) == pytest.approx(later, rel=0.01)


def test_a_pass_that_was_interrupted_hardly_counts() -> None:
    costs = LatencyModel(0.05, {1: 10.0})
    costs.observe(1, 1e6)
    assert costs.ms(1) < 20


def test_a_clock_that_stands_still_leaves_a_positive_time() -> None:
    costs = LatencyModel(0.05, {1: 10.0})
    for _ in range(10_000):
        costs.observe(1, 0.0)
    assert costs.ms(1) > 0


def test_load_shows_on_widths_that_are_not_run() -> None:
    costs = LatencyModel(0.05, {1: 10.0, 6: 15.0})
    for _ in range(40):
        costs.observe(6, 30.0)
    assert costs.ms(6) == pytest.approx(30, rel=0.01)
    assert costs.ms(1) > 14


def test_threads_may_observe_new_widths_while_others_read() -> None:
    """With a dict that is changed in place, this ended in a RuntimeError in 10 of 10 runs."""

    def use(costs: LatencyModel, first: int) -> None:
        for width in range(first, 400, 4):
            costs.observe(width, float(width))
            costs.ms(401)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            for _ in range(NUM_SHARED):
                costs = LatencyModel(0.05, {500: 25.0})
                for done in [threads.submit(use, costs, first) for first in range(1, 5)]:
                    done.result()
    finally:
        sys.setswitchinterval(interval)
