"""An EAGLE-3 head with the KV cache and the features of one sequence.

Pair ``i`` is the feature of position ``i`` with the token at position ``i + 1``; it predicts the token at ``i + 2``.
KV and feature cache are by pair, so rollback is an assignment here too.
"""

from __future__ import annotations

from collections.abc import Sequence

from specrt.engines.contract import FEATURE_CACHE, HIDDEN, ModelSpec
from specrt.engines.interface import Array, Engine, Memory
from specrt.runtime.model import KVCachedModel


class HeadModel(KVCachedModel):
    """A head that is fed the tokens of the text from the second on, ``kv_len`` pairs so far.

    The features of every pass of ``target`` are copied to its feature cache, in all rounds. A pair beyond them reads
    the head's own hidden state of the pair before it. Only pairs of the target's features are kept in a rollback.
    """

    offset = 1
    has_fixed_copies = False

    def __init__(self, engine: Engine, spec: ModelSpec, target: KVCachedModel | None = None) -> None:
        super().__init__(engine, spec)
        assert spec.feature_size is not None
        self._feature_size = spec.feature_size
        self._num_features = 0  # of the target, by position
        self._taken: tuple[int, Memory] | None = None  # of them, those that are not in the cache yet
        self._num_kept = 0  # fed pairs whose feature is the target's
        self._last_row, self._last_pair = 0, -2  # the row of the hidden states that is the last pair's, and that pair
        if target is not None:
            target.feature_reader = self

    def take_features(self, start: int, features: Memory) -> None:
        """See ``specrt.runtime.model.FeatureReader``."""
        self._taken = (start, features)
        self._num_features = start + len(features)

    def copy_features(self) -> None:
        """See ``specrt.runtime.model.FeatureReader``. On a device nothing is copied over the host.

        A verification ends before the copy, whose address differs in each round: so its passes can be one CUDA graph.
        """
        if self._taken is not None:
            (start, features), self._taken = self._taken, None
            self.binding.take(FEATURE_CACHE, start * self._feature_size, features)

    def keep_features(self, num_kept: int) -> None:
        """See ``specrt.runtime.model.FeatureReader``. The last pair is dropped too: its token may be another one."""
        self.copy_features()
        self._num_features = min(self._num_features, num_kept)
        self._num_kept = min(self._num_kept, max(0, num_kept - 1))
        self.kv_len = min(self.kv_len, self._num_kept)

    def write_features(self, features: Array) -> None:
        """Use ``features`` [N, H] for the pairs from the first on, in place of a target's, and discard the KV."""
        self.binding.write(FEATURE_CACHE, features)
        self._taken = None
        self._num_features, self._num_kept, self.kv_len = len(features), 0, 0

    def feed(self, ids: Sequence[int], rows: int, late: Memory | None = None) -> tuple[int, int]:
        """See ``KVCachedModel.feed``. Each pair beyond the target's features takes a pass of its own.

        Raises ``ValueError`` if such pairs are to give more than one row, or if there is no hidden state to read.
        """
        self.copy_features()
        num_known = min(len(ids), max(0, self._num_features - self.kv_len))
        if num_known < len(ids) and (rows > 1 or (num_known == 0 and self._last_pair != self.kv_len - 1)):
            raise ValueError(
                f"pairs {self.kv_len} to {self.kv_len + len(ids) - 1} for {rows} rows: expected features for all of "
                f"them, got {self._num_features} of the target and a hidden state of pair {self._last_pair}"
            )
        passed = (1, 1)
        if num_known or not ids:
            passed = self._feed(ids[:num_known], rows, late if num_known == len(ids) else None)
            self._num_kept = self.kv_len
        for index in range(num_known, len(ids)):
            hidden = self.binding.memory[HIDDEN][self._last_row : self._last_row + 1]
            self.binding.take(FEATURE_CACHE, self.kv_len * self._feature_size, hidden)
            passed = self._feed(ids[index : index + 1], 1, late)
        return passed

    def rollback(self, kv_len: int) -> None:
        """Discard the pairs from ``kv_len`` on, and all that read the head's own hidden states."""
        super().rollback(min(kv_len, self._num_kept))
        self._num_kept = self.kv_len

    def reusable(self, tokens: Sequence[int], min_width: int) -> int:
        """The pairs of the prefix that the target reuses. Ask after the target's rollback to it."""
        return min(self.kv_len, self._num_kept)

    def _feed(self, ids: Sequence[int], rows: int, late: Memory | None) -> tuple[int, int]:
        passed = super().feed(ids, rows, late)
        self._last_row, self._last_pair = rows - 1, self.kv_len - 1
        return passed
