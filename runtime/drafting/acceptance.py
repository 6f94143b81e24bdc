"""Acceptance rates by position in the draft, estimated from past rounds with more weight on recent ones."""

from __future__ import annotations

from collections.abc import Sequence

_POOLED_WEIGHT = 4.0  # weight of the rate over all positions in each position's estimate
_PRIOR_WEIGHT = 3.0  # weight of the prior in the rate over all positions


class Acceptance:
    """P(the draft's token i is accepted, given that those before it were), for i = 0 .. k - 1.

    ``prior`` are such probabilities, measured by ``specrt tune`` or assumed; its last entry is used for all later
    positions. ``memory`` is the weight of a round relative to the next one: 0.92 averages over about a dozen rounds.
    ``weight`` scales the prior: with a larger one it takes more rounds to move the estimates away from it.
    """

    def __init__(self, k: int, prior: Sequence[float], memory: float = 0.92, weight: float = 1.0) -> None:
        self._memory = memory
        self._pooled_weight, self._prior_weight = weight * _POOLED_WEIGHT, weight * _PRIOR_WEIGHT
        self._prior = [*prior, *[prior[-1]] * k][:k]
        self._trials, self._hits = [0.0] * k, [0.0] * k

    def rates(self) -> list[float]:
        """The estimates, [k]. Positions that are seldom reached are estimated mostly from the others."""
        expected = sum(trials * prior for trials, prior in zip(self._trials, self._prior, strict=True))
        # Acceptance on this text over the prior's, for all positions together; 1 before the first round.
        gain = (sum(self._hits) + self._prior_weight) / (expected + self._prior_weight)
        rates = []
        for hits, trials, prior in zip(self._hits, self._trials, self._prior, strict=True):
            pooled = min(0.99, prior * gain)
            rates.append((hits + self._pooled_weight * pooled) / (trials + self._pooled_weight))
        return rates

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Record a round that verified ``num_drafted`` tokens and accepted ``num_accepted`` of them."""
        self.fade(self._memory)
        for position in range(min(num_drafted, num_accepted + 1)):
            self._trials[position] += 1
            self._hits[position] += position < num_accepted

    def fade(self, memory: float) -> None:
        """Multiply the weight of past rounds by ``memory``: the estimates move back to the prior."""
        for values in (self._trials, self._hits):
            values[:] = [value * memory for value in values]


def expected_tokens(rates: Sequence[float]) -> list[float]:
    """Expected committed tokens of a round with K = 0 .. len(rates), with the target's own. [len(rates) + 1]"""
    survival, total = 1.0, 1.0
    tokens = [total]
    for rate in rates:
        survival *= rate
        total += survival
        tokens.append(total)
    return tokens
