"""Drafted ids that the host learns late: on a device they pass from draft to target, and are read with the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specrt.engines.contract import TOKENS
from specrt.engines.interface import Binding, Memory


class DeferredTokens(list[int]):
    """Drafted ids. Each is ``UNKNOWN`` until ``learn``; until then they are where the target's sampler writes its
    tokens.

    That memory [max_rows] i64 is free from one verdict to the next. ``sampler`` is the target's.
    """

    def __init__(self, sampler: Binding) -> None:
        super().__init__()
        self._sampler = sampler
        self.memory = sampler.memory[TOKENS]

    def take(self, token: Memory) -> None:
        """The id to be appended next is in ``token`` [1] i64: keep a copy."""
        self._sampler.take(TOKENS, len(self), token)

    def learn(self, ids: Sequence[int]) -> None:
        """The ids are these, one for each."""
        self[:] = ids


def memory_of(drafted: Sequence[int]) -> Any:
    """The memory [N] i64 of the drafted ids; None where there are none, or the host knows them."""
    return drafted.memory[: len(drafted)] if isinstance(drafted, DeferredTokens) and drafted else None
