"""Exact distributions in rational numbers: a round is run once for each cell of the uniforms that it reads.

The reference decides at the middle of a cell and must decide the same near both ends of it. This checks that its edges
are those computed here in rational numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property, lru_cache
from itertools import accumulate, pairwise
from math import prod

import numpy as np

from specrt.engines import numpy_samplers
from specrt.engines.interface import Array

Tokens = tuple[int, ...]
Distribution = dict[Tokens, Fraction]
Rule = Callable[[Array, Array, Array, Array, tuple[float, float]], tuple[int, int]]
Cell = tuple[Fraction, Fraction]

UNITS = 64  # probabilities are multiples of 1 / 64: exact in fp32, and so are their cumulated sums
NEAR_EDGE = Fraction(1, 100_000)


@dataclass(frozen=True, eq=False)
class Row:
    """Weights of the ids, in rational numbers."""

    weights: tuple[Fraction, ...]

    @cached_property
    def floats(self) -> list[float]:
        return [float(weight) for weight in self.weights]

    @cached_property
    def fp32(self) -> Array:
        return np.array(self.floats, np.float32)

    @cached_property
    def cdf(self) -> list[Fraction]:
        total = sum(self.weights)
        return [value / total for value in accumulate(self.weights)]


Model = Callable[[Tokens], Row]


def random_model(seed: int, size: int, memory: int) -> Model:
    """Distributions over ``size`` ids, one for each context of at most ``memory`` tokens; about one in 9 is 0."""

    @cache
    def row(context: Tokens) -> Row:
        rng = np.random.default_rng([seed, len(context), *context])
        weights = rng.uniform(0.0, 1.0, size) * (rng.uniform(size=size) > 0.12) + np.eye(size)[rng.integers(size)] / 8
        cuts = [round(UNITS * v) for v in np.cumsum(weights / weights.sum())]
        return Row(tuple(Fraction(b - a, UNITS) for a, b in pairwise([0, *cuts])))

    return lambda prefix: row(prefix[len(prefix) - memory :] if len(prefix) > memory else prefix)


# --- the uniforms of a path ----------------------------------------------------------------------------------------


class Path:
    """Uniforms by key, each known only up to the requested edges; ``choices`` are the cells to enter."""

    def __init__(self, choices: tuple[int, ...]) -> None:
        self._choices, self._taken = choices, 0
        self.cells: dict[Hashable, Cell] = {}
        self.siblings: list[tuple[int, ...]] = []

    def at(self, key: Hashable, edges: Iterable[Fraction]) -> float:
        """The middle of one of the cells that ``edges`` cut."""
        low, high = self.cells.get(key, (Fraction(0), Fraction(1)))
        bounds = [low, *sorted({edge for edge in edges if low < edge < high}), high]
        if self._taken == len(self._choices):
            self.siblings += [(*self._choices, other) for other in range(1, len(bounds) - 1)]
            self._choices += (0,)
        choice = self._choices[self._taken]
        self._taken += 1
        self.cells[key] = low, high = bounds[choice], bounds[choice + 1]
        return float((low + high) / 2)


class NearEnds:
    """The same uniforms, all near the lower or all near the upper ends of their cells."""

    def __init__(self, cells: dict[Hashable, Cell], is_upper: bool) -> None:
        self._cells, self._is_upper = cells, is_upper

    def at(self, key: Hashable, edges: Iterable[Fraction]) -> float:
        low, high = self._cells[key]
        margin = min(NEAR_EDGE, (high - low) / 4)
        return float(high - margin if self._is_upper else low + margin)


Uniforms = Path | NearEnds


def exact_distribution(program: Callable[[Uniforms], Tokens], ends: bool = True) -> Distribution:
    """The exact distribution of what ``program`` returns when its uniforms are independent."""
    distribution: Distribution = defaultdict(Fraction)
    pending: list[tuple[int, ...]] = [()]
    while pending:
        path = Path(pending.pop())
        outcome = program(path)
        pending += path.siblings
        distribution[outcome] += prod(high - low for low, high in path.cells.values())
        for is_upper in (False, True) if ends else ():
            assert program(NearEnds(path.cells, is_upper)) == outcome, path.cells
    assert sum(distribution.values()) == 1
    return distribution


# --- block ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proposal:
    """A drafted block and its rows in rational numbers, and the thresholds of ``block``."""

    p: tuple[Row, ...]  # K + 1 rows
    q: tuple[Row, ...]  # K rows
    drafted: Tokens

    @property
    def k(self) -> int:
        return len(self.q)

    @property
    def fp32(self) -> tuple[Array, Array]:
        """p [K + 1, V] and q [K, V]."""
        return np.stack([row.fp32 for row in self.p]), np.stack([row.fp32 for row in self.q])

    @cached_property
    def ratios(self) -> list[Fraction]:
        return [p.weights[x] / q.weights[x] for p, q, x in zip(self.p, self.q, self.drafted, strict=False)]

    @cached_property
    def prefixes(self) -> list[Fraction]:
        """P_0 .. P_K of ``block``."""
        return list(
            accumulate(self.ratios, lambda prefix, ratio: min(prefix * ratio, Fraction(1)), initial=Fraction(1))
        )

    @property
    def edges(self) -> list[Fraction]:
        """The thresholds of the etas."""
        return [self._chance(i) for i in range(1, self.k + 1)]

    def next_row(self, accepted: int) -> Row:
        """The distribution of the token after ``accepted`` ones."""
        if accepted == self.k:
            return self.p[accepted]
        left = self._residual(self.prefixes[accepted], accepted)
        return Row(left) if any(left) else self.p[accepted]

    def _residual(self, prefix: Fraction, row: int) -> tuple[Fraction, ...]:
        pairs = zip(self.p[row].weights, self.q[row].weights, strict=True)
        return tuple(max(prefix * p - q, Fraction(0)) for p, q in pairs)

    def _chance(self, i: int) -> Fraction:
        if i == self.k:
            return self.prefixes[i]
        missing = sum(self._residual(self.prefixes[i], i), Fraction(0))
        rest = missing + 1 - self.prefixes[i]
        return missing / rest if rest else Fraction(1)


# --- rounds --------------------------------------------------------------------------------------------------------

Keys = Callable[[str, int, int], Hashable]  # of (stream, the round's first position, offset)


def by_round(stream: str, start: int, offset: int) -> Hashable:
    """Every round has its own uniforms (a round commits at least one token, so its start identifies it)."""
    return stream, start, offset


def by_position(stream: str, start: int, offset: int) -> Hashable:
    """A position's uniforms stay the same when it is verified again."""
    return stream, start + offset


def common(stream: str, start: int, offset: int) -> Hashable:
    """By position, and draft and target draw with the same uniform."""
    return start + offset


@dataclass(frozen=True)
class Pair:
    """A target and a draft that proposes ``k`` ids a round."""

    target: Model
    draft: Model
    k: int

    def propose(self, prefix: Tokens, uniforms: Uniforms, keys: Keys) -> Proposal:
        drafted: Tokens = ()
        rows = []
        for offset in range(self.k):
            rows.append(self.draft(prefix + drafted))
            drafted += (sample(rows[-1], uniforms, keys("draft", len(prefix), offset)),)
        return Proposal(tuple(self.target(prefix + drafted[:i]) for i in range(self.k + 1)), tuple(rows), drafted)

    def sampled(self, prefix: Tokens, uniforms: Uniforms, keys: Keys) -> Tokens:
        """The tokens that a round of ``block`` commits."""
        verified, start = self.propose(prefix, uniforms, keys), len(prefix)
        eta = [uniforms.at(keys("eta", start, i), [edge]) for i, edge in enumerate(verified.edges)]
        given = *verified.fp32, np.array(verified.drafted), np.array(eta, np.float32)
        accepted, _ = numpy_samplers.block(*given, (0.5, 0.5))
        final = uniforms.at(keys("final", start, accepted), verified.next_row(accepted).cdf)
        again, token = numpy_samplers.block(*given, (0.5, final))
        assert again == accepted
        return (*verified.drafted[:accepted], token)

    def matched(self, prefix: Tokens, uniforms: Uniforms, keys: Keys) -> Tokens:
        """The tokens that a round of ``match`` commits."""
        verified = self.propose(prefix, uniforms, keys)
        tokens = [sample(row, uniforms, keys("target", len(prefix), i)) for i, row in enumerate(verified.p)]
        accepted = numpy_samplers.match(np.array(tokens), np.array(verified.drafted))
        return (*verified.drafted[:accepted], tokens[accepted])


def sample(row: Row, uniforms: Uniforms, key: Hashable) -> int:
    return _drawn(row, uniforms.at(key, row.cdf))


@lru_cache(maxsize=4096)
def _drawn(row: Row, uniform: float) -> int:
    return numpy_samplers.draw(row.fp32, 0.5, uniform)


# --- distributions
# ----------------------------------------------------------------------------------------------------------


def bias(distribution: Distribution, target: Model, length: int) -> float:
    """Total variation between ``length`` tokens of the target's and of what ``distribution`` gives and the target
    continues.
    """
    wrong, plain = _continued(distribution, target, length), _continued({(): Fraction(1)}, target, length)
    return sum(abs(wrong.get(tokens, 0) - plain.get(tokens, 0)) for tokens in {*wrong, *plain}) / 2


def _continued(distribution: Distribution, target: Model, length: int) -> dict[Tokens, float]:
    by_length: list[dict[Tokens, float]] = [defaultdict(float) for _ in range(length + 1)]
    for tokens, chance in distribution.items():
        by_length[len(tokens)][tokens] += float(chance)
    for shorter, longer in pairwise(by_length):
        for tokens, mass in shorter.items():
            for token, weight in enumerate(target(tokens).floats):
                longer[(*tokens, token)] += mass * weight
    return by_length[-1]
