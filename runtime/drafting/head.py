"""An EAGLE-3 head with the KV cache and the features of one sequence.

Pair ``i`` is the feature of position ``i`` with the token at position ``i + 1``; it predicts the token at ``i + 2``.
The KV is by pair, so rollback is an assignment here too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrt.engines.contract import FEATURE_CACHE, FEATURE_ROWS, HIDDEN, ModelSpec
from specrt.engines.interface import Array, Engine, Memory
from specrt.runtime.model import KVCachedModel


class HeadModel(KVCachedModel):
    """A head that is fed the tokens of the text from the second on, ``kv_len`` pairs so far.

    The rows of its feature cache [max_width + capacity + 1, H] are, in this order:

    * the features of the target's last pass, which writes them there (``feature_memory``);
    * one for each position: features that the head had not read when the target ran again are copied there, in all
      rounds. Others are given up, and ``keep_features`` lets the target write again what is needed again;
    * the head's own hidden state, which a pair beyond the target's features reads.

    So a draft of a round copies no features, and its addresses are the same in each round. Only pairs of the target's
    features are kept in a rollback.
    """

    offset = 1

    def __init__(self, engine: Engine, spec: ModelSpec) -> None:
        super().__init__(engine, spec)
        assert spec.feature_size is not None
        self._feature_size = spec.feature_size
        self._feature_rows = self.binding.host[FEATURE_ROWS]  # [max_width] i64
        self._own_row = spec.feature_slots - 1
        self._num_features = 0  # of the target, by position
        self._oldest = 0  # the features from this position on are in the cache
        self._pass_start = 0  # the features from this position on are in the rows of the target's last pass
        self._num_kept = 0  # fed pairs whose feature is the target's
        self._last_row, self._last_pair = 0, -2  # the row of the hidden states that is the last pair's, and that pair

    @property
    def feature_memory(self) -> Memory:
        """The cache; a target that is opened on it writes the features of each pass to its first rows."""
        return self.binding.memory[FEATURE_CACHE]

    def take_features(self, start: int, features: Memory) -> None:
        """See ``specrt.runtime.model.FeatureReader``. They are in the cache already."""
        self._pass_start, self._num_features = start, start + len(features)
        self._oldest = min(self._oldest, start)

    def copy_features(self) -> None:
        """See ``specrt.runtime.model.FeatureReader``. What the head has read is not copied."""
        start, end = self._pass_start, self._num_features
        first = max(start, self._num_kept)
        if first < end:
            unread = self.feature_memory[first - start : end - start]
            self.binding.take(FEATURE_CACHE, self._row_of(first) * self._feature_size, unread)
        if self._num_kept > start:
            self._oldest = min(self._num_kept, end)
        self._pass_start = end

    def keep_features(self, num_kept: int) -> int:
        """See ``specrt.runtime.model.FeatureReader``. The last pair is dropped too: its token may be another one."""
        is_missing = 0 < num_kept <= self._oldest
        self._num_features = min(self._num_features, num_kept - is_missing)
        self._num_kept = min(self._num_kept, max(0, num_kept - 1))
        self.kv_len = min(self.kv_len, self._num_kept)
        return num_kept - is_missing

    def write_features(self, features: Array) -> None:
        """Use ``features`` [N, H] for the pairs from the first on, in place of a target's, and discard the KV."""
        self.binding.write(FEATURE_CACHE, features, self._row_of(0))
        self._num_features = self._pass_start = len(features)
        self._oldest = self._num_kept = self.kv_len = 0

    def stale_rows(self) -> list[int]:
        """The rows of the cache that no later pass reads before they are written."""
        known = set(self._rows_of(self._oldest, max(0, self._num_features - self._oldest)).tolist())
        return [row for row in range(self.spec.feature_slots) if row not in known]

    def feed(self, ids: Sequence[int], rows: int, late: Memory | None = None) -> tuple[int, int]:
        """See ``KVCachedModel.feed``. Each pair beyond the target's features takes a pass of its own.

        Raises ``ValueError`` if such pairs are to give more than one row, or if there is nothing for them to read.
        """
        num_known = min(len(ids), max(0, self._num_features - self.kv_len))
        is_gone = num_known > 0 and self.kv_len < self._oldest
        is_first_own = num_known == 0 and self._last_pair != self.kv_len - 1
        if is_gone or (num_known < len(ids) and (rows > 1 or is_first_own)):
            raise ValueError(
                f"pairs {self.kv_len} to {self.kv_len + len(ids) - 1} for {rows} rows: expected features for all of "
                f"them, got those of positions {self._oldest} to {self._num_features - 1} of the target and a hidden "
                f"state of pair {self._last_pair}"
            )
        passed = (1, 1)
        if num_known or not ids:
            passed = super().feed(ids[:num_known], rows, late if num_known == len(ids) else None)
            self._num_kept = self.kv_len
        for index in range(num_known, len(ids)):
            hidden = self.binding.memory[HIDDEN][self._last_row : self._last_row + 1]
            self.binding.take(FEATURE_CACHE, self._own_row * self._feature_size, hidden)
            passed = super().feed(ids[index : index + 1], 1, late)
        return passed

    def rollback(self, kv_len: int) -> None:
        """Discard the pairs from ``kv_len`` on, and all that read the head's own hidden states."""
        super().rollback(min(kv_len, self._num_kept))
        self._num_kept = self.kv_len

    def reusable(self, tokens: Sequence[int], min_width: int) -> int:
        """The pairs of the prefix that the target reuses. Ask after the target's rollback to it."""
        return min(self.kv_len, self._num_kept)

    def _pass(self, ids: Sequence[int], rows: int, late: Memory | None = None) -> tuple[int, int]:
        num_ids, is_own = len(ids), self.kv_len >= self._num_features
        self._feature_rows[:num_ids] = self._own_row if is_own else self._rows_of(self.kv_len, num_ids)
        self._feature_rows[num_ids : max(num_ids, self.min_width)] = self._feature_rows[num_ids - 1]
        passed = super()._pass(ids, rows, late)
        self._last_row, self._last_pair = rows - 1, self.kv_len - 1
        return passed

    def _row_of(self, position: int) -> int:
        """The row for a position, beyond those of a pass."""
        return self.spec.max_width + position

    def _rows_of(self, start: int, count: int) -> Array:
        """The rows of the features of ``count`` positions from ``start`` on."""
        rows = self._all_positions[start : start + count] - self._pass_start
        return np.where(rows < 0, rows + self._row_of(self._pass_start), rows)
