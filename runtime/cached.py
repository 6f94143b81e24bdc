"""A model with the KV cache of one sequence: fixed buffers and one integer. Rollback is an assignment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrt.engines.seam import Engine
from specrt.engines.spec import (
    INPUT_IDS,
    LOGITS,
    NUM_ACCEPTED,
    POSITION_IDS,
    ROW_INDICES,
    SEQLENS_K,
    TOKENS,
    TOTAL_SEQUENCE_LENGTH,
    ModelSpec,
)


class CachedModel:
    """Feeds tokens after the ``kv_len`` that the cache holds; the head judges the last rows of a pass.

    Stale slots beyond ``kv_len`` stay in the buffer, are masked by position, and are overwritten by the next pass.
    """

    def __init__(self, engine: Engine, head: Engine, slot: int, spec: ModelSpec) -> None:
        self.spec = spec
        self.kv_len = 0
        self._binding = engine.open(slot)
        host = self._binding.host
        self._ids = host[INPUT_IDS][0]  # [max_width] i64
        self._positions = host[POSITION_IDS][0]  # [max_width] i64
        self._last, self._total = host[SEQLENS_K], host[TOTAL_SEQUENCE_LENGTH]  # [1] i32 each
        self._rows = host[ROW_INDICES]  # [max_rows] i64
        self._all_positions = np.arange(spec.capacity, dtype=np.int64)
        shared = {name: host[name] for name in (LOGITS, INPUT_IDS, ROW_INDICES)}
        try:
            self._head = head.open(slot, shared)
        except BaseException:
            self._binding.close()
            raise
        self._num_accepted, self._tokens = self._head.host[NUM_ACCEPTED], self._head.host[TOKENS]

    def verify(self, ids: Sequence[int], num_drafted: int) -> tuple[int, int]:
        """Feed ``ids``, whose last ``num_drafted`` are drafted; return (accepted n, the model's own next token).

        Raises ``ValueError`` when there is nothing to feed or the buffers cannot hold it.
        """
        rows = num_drafted + 1
        width = self._feed(ids, rows)
        self._head.run(width, rows)
        accepted = int(self._num_accepted[0])
        return accepted, int(self._tokens[accepted])

    def prefill(self, ids: Sequence[int]) -> None:
        """Feed ``ids`` and keep nothing but their KV."""
        if ids:
            self._feed(ids, 1)

    def rollback(self, kv_len: int) -> None:
        """Forget everything from position ``kv_len`` on. Raises ``ValueError`` for more than the cache holds."""
        if not 0 <= kv_len <= self.kv_len:
            raise ValueError(f"rollback to {kv_len}, but the cache holds {self.kv_len} tokens")
        self.kv_len = kv_len

    def close(self) -> None:
        """Give both slots back."""
        self._head.close()
        self._binding.close()

    def _feed(self, ids: Sequence[int], rows: int) -> int:
        """Passes of at most ``max_width`` tokens; the last, whose width is returned, gives the last ``rows`` rows."""
        remaining, start = len(ids), 0
        if remaining < rows or self.kv_len + remaining > self.spec.capacity:
            raise ValueError(
                f"{remaining} tokens for {rows} rows after {self.kv_len} cached ones: "
                f"expected at least {rows} and a total of at most {self.spec.capacity}"
            )
        while remaining > self.spec.max_width:
            width = min(self.spec.max_width, remaining - rows)
            self._pass(ids[start : start + width], 1)
            start, remaining = start + width, remaining - width
        self._pass(ids[start:] if start else ids, rows)
        return remaining

    def _pass(self, ids: Sequence[int], rows: int) -> None:
        width, start = len(ids), self.kv_len
        end = start + width
        self._ids[:width] = ids
        self._positions[:width] = self._all_positions[start:end]
        self._last[0], self._total[0] = end - 1, end
        self._rows[:rows] = self._all_positions[width - rows : width]
        self._binding.run(width, rows)
        self.kv_len = end
