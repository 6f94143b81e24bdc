"""Mixture of experts: how many experts a pass of several tokens reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Experts:
    """The expert layers of a model whose graph reads only the experts chosen by the router.

    Each of ``num_layers`` layers has ``num_experts`` experts of ``bytes_per_expert`` as stored, and each token uses
    ``experts_per_token`` of them.
    """

    num_layers: int
    num_experts: int
    experts_per_token: int
    bytes_per_expert: int

    def __post_init__(self) -> None:
        if not (1 <= self.experts_per_token <= self.num_experts and self.num_layers >= 1 and self.bytes_per_expert > 0):
            raise ValueError(f"experts: {self} is contradictory")

    def expected_distinct(self, num_tokens: int) -> float:
        """The expected number of distinct experts that ``num_tokens`` tokens use in a layer.

        E (1 - (1 - k/E)^M), if tokens choose their experts independently and all experts are equally likely.
        Neighbouring tokens share more experts than that, so this is an upper estimate.
        """
        missed = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.num_experts * (1 - missed)

    def further_bytes(self, num_tokens: int) -> int:
        """Expected bytes that a pass of ``num_tokens`` tokens reads in addition to those of a pass of one token."""
        further = self.expected_distinct(num_tokens) - self.experts_per_token
        return round(self.num_layers * self.bytes_per_expert * further)
