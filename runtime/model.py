"""A model with the KV cache of one sequence: fixed buffers and one integer. Rollback is an assignment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from specrt.engines.contract import (
    FEATURES,
    INPUT_IDS,
    POSITION_IDS,
    ROW_INDICES,
    SEQLENS_K,
    TOTAL_SEQUENCE_LENGTH,
    ModelSpec,
    model_contract,
)
from specrt.engines.interface import Array, Engine, Memory

_BLOCK = 64  # ids
UNKNOWN = -1  # an id that is on the device and not yet read by the host


class FeatureReader(Protocol):
    """What reads a target's features: the head that drafts for it."""

    def take_features(self, start: int, features: Memory) -> None:
        """``features`` [M, H] of the positions from ``start`` on are in the memory of a pass."""
        ...

    def copy_features(self) -> None:
        """Copy what is still to be read, before the next pass overwrites it. Doing so twice is allowed."""
        ...

    def keep_features(self, num_kept: int) -> int:
        """The features from position ``num_kept`` on are not those of the sequence any more.

        Returns how many tokens the model keeps: one fewer where the last feature is needed and not at hand.
        """
        ...


class KVCachedModel:
    """Feeds tokens after the ``kv_len`` cached ones; ``read(LOGITS)`` returns the last rows of the last pass.

    Entries beyond ``kv_len`` are stale: they stay in the buffer, are masked by position, and are overwritten by the
    next pass. With ``min_width`` 2 every pass has at least two tokens and two rows: kernels for one row sum in another
    order, while those for two or more give the same bits.

    With a ``kv_owner`` the cache is that model's memory, for the same layers with other weights, and tokens that it
    holds need not be fed again. Call ``missing`` before each draft. Entries written beyond the kv_owner's ``kv_len``
    are stale for it, and the pass that verifies the draft overwrites all of them.

    A ``feature_reader`` is given the features of every pass, and notified of every rollback. They are written to
    ``feature_memory``, if given. ``offset`` is the position of the token that is fed first: 0, and 1 for a head.
    """

    offset = 0

    def __init__(
        self,
        engine: Engine,
        spec: ModelSpec,
        kv_owner: KVCachedModel | None = None,
        feature_memory: Memory | None = None,
    ) -> None:
        self.spec = spec
        self._kv_owner = kv_owner
        self.feature_reader: FeatureReader | None = None
        self.kv_len = 0
        self.min_width = 1
        self._tokens: list[int] = []  # the fed tokens; stale beyond kv_len
        self._num_wide = 0  # how many of them were fed in passes of two or more tokens
        shared: dict[str, Memory] = {} if kv_owner is None else kv_owner.kv_memory()
        if feature_memory is not None:
            shared[FEATURES] = feature_memory
        self.binding = engine.open(shared)
        host = self.binding.host
        self._ids = host[INPUT_IDS][0]  # [max_width] i64
        self._positions = host[POSITION_IDS][0]  # [max_width] i64
        # [1] i32 each; the standard dialect takes the length from the positions
        self._last, self._total = (host.get(n, np.zeros(1, np.int32)) for n in (SEQLENS_K, TOTAL_SEQUENCE_LENGTH))
        self._rows = host[ROW_INDICES]  # [max_rows] i64
        self._all_positions = np.arange(spec.capacity, dtype=np.int64)

    def feed(self, ids: Sequence[int], rows: int, late: Memory | None = None) -> tuple[int, int]:
        """Feed ``ids``; the last ``rows`` of them get logits. Returns the (width, rows) of the last pass.

        ``late`` [N] i64 is the device memory of the last N ids, if the host does not know them yet; call ``learn`` when
        it does.

        More than ``max_width`` ids take several passes. Rows beyond the requested ones repeat the last one. Raises
        ``ValueError`` if there is nothing to feed or the buffers are too small.
        """
        remaining, start = len(ids), 0
        if remaining < rows or self.kv_len + max(remaining, self.min_width) > self.spec.capacity:
            raise ValueError(
                f"{remaining} tokens for {rows} rows after {self.kv_len} cached ones: "
                f"expected at least {rows} and a total of at most {self.spec.capacity}"
            )
        while remaining > self.spec.max_width:
            width = min(self.spec.max_width, remaining - rows)
            self._pass(ids[start : start + width], 1)
            start, remaining = start + width, remaining - width
        return self._pass(ids[start:] if start else ids, rows, late)

    def prefill(self, ids: Sequence[int]) -> None:
        """Feed ``ids`` for their KV alone; no logits are needed."""
        if ids:
            self.feed(ids, 1)

    def learn(self, start: int, ids: Sequence[int]) -> None:
        """Record the ids that were fed from position ``start`` on, up to ``kv_len``."""
        start -= self.offset
        known = ids[: max(0, self.kv_len - start)]
        self._tokens[start : start + len(known)] = known

    def read(self, *names: str) -> list[Array]:
        """See ``specrt.engines.interface.Binding.read``."""
        return self.binding.read(*names)

    def kv_memory(self) -> dict[str, Memory]:
        """The memory of its cache, by tensor name."""
        aliases = (tensor.alias for tensor in model_contract(self.spec).outputs)
        return {name: self.binding.memory[name] for name in aliases if name is not None}

    def missing(self, committed: Sequence[int]) -> Sequence[int]:
        """The tokens of ``committed`` that the cache lacks. Sets ``kv_len`` to that of the ``kv_owner``, if any."""
        if self._kv_owner is not None:
            self.kv_len = self._kv_owner.kv_len
        return committed[self.kv_len + self.offset :]

    def rollback(self, kv_len: int) -> None:
        """Discard everything from position ``kv_len`` on; with a ``feature_reader``, one token more if it says so.

        Raises ``ValueError`` if the cache is shorter.
        """
        if not 0 <= kv_len <= self.kv_len:
            raise ValueError(f"rollback to {kv_len}, but the cache holds {self.kv_len} tokens")
        self.kv_len = kv_len
        if self.feature_reader is not None:
            self.kv_len = self.feature_reader.keep_features(kv_len)

    def release_features(self) -> None:
        """Let the reader copy what the next pass overwrites. A pass does so too, but then it is a part of its graph."""
        if self.feature_reader is not None:
            self.feature_reader.copy_features()

    def reusable(self, tokens: Sequence[int], min_width: int) -> int:
        """Length of the prefix of ``tokens[:-1]`` that is cached from passes of at least ``min_width`` tokens."""
        if self._kv_owner is not None:
            return 0  # its cache is the kv_owner's
        limit = min(self.kv_len, len(tokens) - 1)
        if min_width > 1:
            limit = min(limit, self._num_wide)
        return _num_equal(self._tokens, tokens, limit)

    @property
    def can_copy(self) -> bool:
        """Whether ``copy_prefix`` can be used: the cache is on the host and its own, and no features go with it."""
        has_features = self.feature_reader is not None or self.offset > 0
        return not (self.binding.is_async or self._kv_owner is not None or has_features)

    def copy_prefix(self, source: KVCachedModel, num_tokens: int) -> None:
        """Replace the cache by the first ``num_tokens`` of that of ``source``, another cache of the same engine."""
        caches: Iterator[tuple[Any, Any]] = zip(self.kv_memory().values(), source.kv_memory().values(), strict=True)
        for cache, other in caches:  # [1, num_kv_heads, capacity, head_dim]
            cache[:, :, :num_tokens] = other[:, :, :num_tokens]
        self._tokens = source._tokens[:num_tokens]
        self._num_wide = min(source._num_wide, num_tokens)
        self.kv_len = num_tokens

    def close(self) -> None:
        """Free its memory."""
        self.binding.close()

    def _pass(self, ids: Sequence[int], rows: int, late: Memory | None = None) -> tuple[int, int]:
        num_ids, start = len(ids), self.kv_len
        width, num_rows = max(num_ids, self.min_width), max(rows, self.min_width)
        end = start + width
        self._ids[:num_ids] = ids
        self._ids[num_ids:width] = ids[-1]  # the KV of padding is stale at once
        self._positions[:width] = self._all_positions[start:end]
        self._last[0], self._total[0] = end - 1, end
        self._rows[:rows] = self._all_positions[num_ids - rows : num_ids]
        self._rows[rows:num_rows] = num_ids - 1
        if late is not None:
            self._ids[num_ids - len(late) : width] = 0
        self.binding.upload()
        if late is not None:
            self.binding.take(INPUT_IDS, num_ids - len(late), late)
        self.release_features()
        self.binding.run(width, num_rows)
        if self.feature_reader is not None:
            self.feature_reader.take_features(start, self.binding.memory[FEATURES][:num_ids])
        self._tokens[start:] = ids
        if width > 1:
            self._num_wide = start + num_ids if self._num_wide >= start else self._num_wide
        else:
            self._num_wide = min(self._num_wide, start)
        self.kv_len = start + num_ids
        return width, num_rows


def _num_equal(ids: Sequence[int], others: Sequence[int], limit: int) -> int:
    """The length of the common prefix, at most ``limit``. Compares slices, since long prompts have many ids."""
    for start in range(0, limit, _BLOCK):
        end = min(start + _BLOCK, limit)
        if list(ids[start:end]) != list(others[start:end]):
            return next(i for i in range(start, end) if ids[i] != others[i])
    return max(limit, 0)
