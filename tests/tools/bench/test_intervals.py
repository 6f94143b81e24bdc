"""Intervals: against closed forms, by simulation over prompts and runs, and honest about two prompts."""

from __future__ import annotations

import math
import random
from statistics import stdev

import numpy as np
import pytest

from specrt.tools.bench.intervals import group_intervals, interval, mean_interval, t975
from specrt.tools.bench.methods import Answer


def runs(*seconds: float, tokens: int = 10) -> list[Answer]:
    return [Answer((1,) * tokens, s) for s in seconds]


def noisy(seconds: float, seed: int) -> list[list[Answer]]:
    """Prompts of very different lengths; ``seed`` draws the noise of the timings, 2 %."""
    draw = random.Random(seed)
    return [runs(seconds * length * draw.gauss(1, 0.02)) for length in range(1, 21)]


def test_the_interval_is_of_pairs() -> None:
    """Prompts differ twentyfold, but as each is compared with itself the interval is narrow, and holds the truth."""
    found = interval(noisy(1.0, 1), noisy(1.5, 2))
    assert found is not None
    assert 1.45 < found[0] < 1.5 < found[1] < 1.55


def test_the_interval_is_wide_where_prompts_disagree() -> None:
    found = interval([runs(0.5 if i % 2 else 2.0) for i in range(20)], [runs(1.0)] * 20)
    assert found is not None
    assert found[0] < 0.72 < 0.9 < found[1]


@pytest.mark.parametrize("ratios", [(1.30, 1.40), (1.1, 1.2, 1.4), (0.9, 1.0, 1.1, 1.3, 1.2, 1.05)])
def test_few_prompts_have_the_interval_of_a_mean_by_students_t(ratios: tuple[float, ...]) -> None:
    """Prompts of equal weight and small spread: the log of the ratio is nearly a mean, whose interval is known."""
    near = [1 + (ratio - 1) / 20 for ratio in ratios]
    found = interval([runs(1 / ratio) for ratio in near], [runs(1.0)] * len(near))
    assert found is not None
    half = t975(len(near) - 1) * stdev(math.log(ratio) for ratio in near) / math.sqrt(len(near))
    assert (math.log(found[1]) - math.log(found[0])) / 2 == pytest.approx(half, rel=0.08)


def test_two_prompts_give_wide_intervals() -> None:
    """1.2 and 1.4 times plain are no proof of a gain: with two of them t is 12.7."""
    found = interval([runs(1 / 1.2), runs(1 / 1.4)], [runs(1.0)] * 2)
    assert found is not None
    assert found[0] < 0.6 and found[1] > 2.5


def test_a_single_prompt_or_nothing_has_no_interval() -> None:
    assert interval([runs(1.0, 1.1, 0.9)], [runs(1.0, 1.0, 1.0)]) is None
    assert interval([runs(1.0, tokens=0)] * 3, [runs(1.0)] * 3) is None
    assert interval([runs(0.0)] * 3, [runs(1.0)] * 3) is None


def test_runs_that_disagree_widen_the_interval() -> None:
    """Every prompt has the ratio 1.5 by its median; only the runs spread, which a bootstrap of prompts cannot see."""
    theirs = [runs(1.5, 1.5, 1.5)] * 6
    steady = interval([runs(1.0, 1.0, 1.0)] * 6, theirs)
    shaky = interval([runs(0.8, 1.0, 1.25)] * 6, theirs)
    assert steady == pytest.approx((1.5, 1.5))
    assert shaky is not None and shaky[0] < 1.45 < 1.55 < shaky[1]


def test_runs_of_a_block_stay_together() -> None:
    """A slow moment that affected both methods in the same run does not change their ratio."""
    slow = [runs(1.0, 9.0)] * 4
    assert interval(slow, slow) == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize("num", [2, 3, 8])
def test_of_a_hundred_intervals_ninety_five_hold_the_truth(num: int) -> None:
    """Log ratios of prompts around log 1.3, spread 0.1. 300 trials: 95 % of them, deviation 1.3 points."""
    draw = np.random.default_rng(num)
    held = 0
    for _ in range(300):
        ratios = np.exp(draw.normal(math.log(1.3), 0.1, num))
        found = interval([runs(1 / ratio) for ratio in ratios], [runs(1.0)] * num)
        assert found is not None
        held += found[0] <= 1.3 <= found[1]
    assert 0.90 < held / 300 < 0.99


def groups_of(num: int, each: int) -> dict[str, list[int]]:
    return {str(group): [group * each + i for i in range(each)] for group in range(num)}


@pytest.mark.parametrize("each", [1, 2, 3])
def test_small_groups_share_their_spread(each: int) -> None:
    """12 groups about ratios of their own, spread 0.2 within; one of 4 lends those of one prompt a spread."""
    draw = np.random.default_rng(each)
    groups = {**groups_of(12, each), "more": [12 * each + i for i in range(4)]}
    truths = {name: 1 + 0.2 * number for number, name in enumerate(groups)}
    held, trials = 0, 40
    mean_held = 0
    for _ in range(trials):
        ratios = [truths[name] * math.exp(draw.normal(0, 0.2)) for name, which in groups.items() for _ in which]
        ours, theirs = [runs(1 / ratio) for ratio in ratios], [runs(1.0)] * len(ratios)
        for name, found in group_intervals(ours, theirs, groups).items():
            assert found is not None
            held += found[0] <= truths[name] <= found[1]
        mean, found = mean_interval(ours, theirs, groups)
        assert found is not None and found[0] < mean < found[1]
        mean_held += found[0] <= sum(truths.values()) / len(truths) <= found[1]
    assert 0.90 < held / (trials * len(groups)) < 0.985
    assert mean_held >= 0.85 * trials


def test_a_group_of_many_keeps_its_own_spread() -> None:
    """Six prompts that agree are not made doubtful by two others that do not."""
    ours = [*(runs(0.5) for _ in range(6)), runs(0.3), runs(1.5)]
    groups = {"steady": list(range(6)), "wild": [6, 7]}
    found = group_intervals(ours, [runs(1.0)] * 8, groups)
    assert found["steady"] == pytest.approx((2.0, 2.0))
    assert found["wild"] is not None and found["wild"][0] < 1 < found["wild"][1]


def test_without_any_spread_groups_have_no_interval() -> None:
    groups = groups_of(2, 1)
    ours, theirs = [runs(0.5), runs(0.25)], [runs(1.0)] * 2
    assert group_intervals(ours, theirs, groups) == {"0": None, "1": None}
    mean, found = mean_interval(ours, theirs, groups)
    assert mean == pytest.approx(3.0) and found is None


def test_students_t() -> None:
    """Against the published table, to three digits."""
    for degrees, quantile in ((1, 12.706), (10, 2.228), (11, 2.201), (20, 2.086), (60, 2.000), (1000, 1.962)):
        assert t975(degrees) == pytest.approx(quantile, abs=6e-4)
