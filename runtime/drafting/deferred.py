"""Drafted ids that stay on the device. The draft passes them to the target; the host reads them after verification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specrt.engines.contract import TOKENS
from specrt.engines.interface import Binding, Memory


class DeferredTokens(list[int]):
    """Drafted ids. Each is ``UNKNOWN`` until ``learn``; until then the ids are in the memory where the target's sampler
    writes its tokens.

    That memory [max_rows] i64 is free between two verifications. ``sampler`` is the target's.
    """

    def __init__(self, sampler: Binding) -> None:
        super().__init__()
        self._sampler = sampler
        self.memory = sampler.memory[TOKENS]

    def take(self, token: Memory) -> None:
        """Copy the next id, which is in ``token`` [1] i64."""
        self._sampler.take(TOKENS, len(self), token)

    def learn(self, ids: Sequence[int]) -> None:
        """Replace the ``UNKNOWN`` entries by ``ids``, one for each."""
        self[:] = ids


def memory_of(drafted: Sequence[int]) -> Any:
    """The memory [N] i64 of the drafted ids; None if there are none or the host knows them."""
    return drafted.memory[: len(drafted)] if isinstance(drafted, DeferredTokens) and drafted else None
