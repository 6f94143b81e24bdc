"""95 % intervals of a ratio of speeds, by a bootstrap over prompts and over the runs of each prompt.

Prompts are resampled, and for each of these its runs. Runs of two methods in the same block are resampled in pairs. A
bootstrap of a few prompts is too narrow, so its standard error, on a logarithmic scale, is widened like that of a mean:
by sqrt(n / (n - 1)) and Student's t with n - 1 degrees of freedom, for n prompts. With two prompts t is 12.7.

A group of few prompts (a category) is too small to estimate its own spread. Its prompts are assumed to vary about their
group's ratio as those of all groups do. The pooled variance has the degrees of freedom of all groups (the residual of a
one-way analysis of variance). A group of ``OWN_SPREAD_PROMPTS`` or more uses its own variance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specrt.engines.interface import Array
from specrt.tools.bench.methods import Answer

NUM_RESAMPLES = 2000
NUM_RUN_RESAMPLES = 64
LEAST_PROMPTS = 2
OWN_SPREAD_PROMPTS = 5
_T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # of 1, 2, ... degrees of freedom
Interval = tuple[float, float]
Runs = Sequence[Sequence[Answer]]  # by prompt and run


@dataclass(frozen=True)
class _Estimate:
    """The log of a ratio over ``num`` prompts; ``variance`` is that of one prompt (0 if there is only one)."""

    center: float
    variance: float
    num: int


def interval(ours: Runs, theirs: Runs) -> Interval | None:
    """Interval of the tokens per second of ``ours`` over ``theirs``; None for one prompt, or where one took no time."""
    found = _estimate(ours, theirs)
    return None if found is None or found.num < LEAST_PROMPTS else _own(found)


def group_intervals(ours: Runs, theirs: Runs, groups: Mapping[str, Sequence[int]]) -> dict[str, Interval | None]:
    """The same for each group of prompts, by index; None where neither the group nor the others have a variance."""
    estimates = _estimates(ours, theirs, groups)
    spread, degrees = _pooled(estimates.values())
    found: dict[str, Interval | None] = {}
    for name, estimate in estimates.items():
        if estimate is None or (estimate.num < OWN_SPREAD_PROMPTS and not degrees):
            found[name] = None
        elif estimate.num >= OWN_SPREAD_PROMPTS:
            found[name] = _own(estimate)
        else:
            found[name] = _around(estimate.center, spread / estimate.num, degrees)
    return found


def mean_interval(ours: Runs, theirs: Runs, groups: Mapping[str, Sequence[int]]) -> tuple[float, Interval | None]:
    """The mean of the groups' ratios, each counting the same, and its interval.

    By first-order propagation of errors, from the variance of all prompts about their groups.
    """
    estimates = [estimate for estimate in _estimates(ours, theirs, groups).values() if estimate is not None]
    if not estimates:
        return 0.0, None
    ratios = np.exp([estimate.center for estimate in estimates])
    spread, degrees = _pooled(estimates)
    mean = float(ratios.mean())
    if not degrees:
        return mean, None
    variances = [(ratio * ratio) * spread / each.num for ratio, each in zip(ratios, estimates, strict=True)]
    return mean, _around(float(np.log(mean)), float(sum(variances)) / (len(ratios) * mean) ** 2, degrees)


def _estimates(ours: Runs, theirs: Runs, groups: Mapping[str, Sequence[int]]) -> dict[str, _Estimate | None]:
    return {name: _estimate([ours[i] for i in which], [theirs[i] for i in which]) for name, which in groups.items()}


def _estimate(ours: Runs, theirs: Runs) -> _Estimate | None:
    num = len(ours)
    tokens = np.array([[len(a[0].token_ids), len(b[0].token_ids)] for a, b in zip(ours, theirs, strict=True)])  # [P, 2]
    if not num or not tokens.sum(axis=0).all():
        return None
    draw = np.random.default_rng(0)
    seconds = np.stack([_medians(a, b, draw) for a, b in zip(ours, theirs, strict=True)])  # [P, T, 2]
    if not seconds.all():
        return None
    center = float(_log_ratio(tokens[None], _seconds_of(ours, theirs)[None])[0])
    if num < LEAST_PROMPTS:
        return _Estimate(center, 0.0, num)
    prompts = draw.integers(num, size=(NUM_RESAMPLES, num))  # [R, P]
    which = draw.integers(NUM_RUN_RESAMPLES, size=prompts.shape)
    usable = tokens[prompts].sum(axis=1).all(axis=1)  # [R]: resamples in which both returned something
    drawn = _log_ratio(tokens[prompts][usable], seconds[prompts, which][usable])  # [R]
    return _Estimate(center, float(drawn.var()) * num * num / (num - 1), num)


def _pooled(estimates: Iterable[_Estimate | None]) -> tuple[float, int]:
    """The pooled variance of one prompt about its group's ratio, and its degrees of freedom."""
    weights = [(each.num - 1, each.variance) for each in estimates if each is not None]
    degrees = sum(weight for weight, _ in weights)
    return sum(weight * variance for weight, variance in weights) / max(1, degrees), degrees


def _own(estimate: _Estimate) -> Interval:
    return _around(estimate.center, estimate.variance / estimate.num, estimate.num - 1)


def _around(center: float, variance: float, degrees: int) -> Interval:
    half = t975(degrees) * float(np.sqrt(variance))
    return float(np.exp(center - half)), float(np.exp(center + half))


def t975(degrees: int) -> float:
    """The 97.5 % quantile of Student's t, to three digits (Abramowitz and Stegun 26.7.5 beyond the table)."""
    if degrees <= len(_T975):
        return _T975[degrees - 1]
    z = 1.95996
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + float(sum(term / degrees**power for power, term in enumerate(terms, 1)))


def _log_ratio(tokens: Array, seconds: Array) -> Array:
    """[R, P, 2] each: [R] f64, sums over the prompts."""
    total = np.log(tokens.sum(axis=1)) - np.log(seconds.sum(axis=1))  # [R, 2]
    ratio: Array = total[:, 0] - total[:, 1]
    return ratio


def _seconds_of(ours: Runs, theirs: Runs) -> Array:
    """[P, 2] f64: medians over the runs."""
    pairs = zip(ours, theirs, strict=True)
    return np.array([[np.median([a.seconds for a in runs]) for runs in pair] for pair in pairs])


def _medians(ours: Sequence[Answer], theirs: Sequence[Answer], draw: np.random.Generator) -> Array:
    """[T, 2] f64: seconds of both, medians of resampled runs; in pairs if both have the same number of runs."""
    drawn = [draw.integers(len(runs), size=(NUM_RUN_RESAMPLES, len(runs))) for runs in (ours, theirs)]
    if len(ours) == len(theirs):
        drawn[1] = drawn[0]
    pairs = zip((ours, theirs), drawn, strict=True)
    return np.stack([np.median(np.array([a.seconds for a in runs])[which], axis=1) for runs, which in pairs], axis=1)
