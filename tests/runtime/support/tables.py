"""Tables for the fake engine: a prefix gives the next token, or logits, by a hash of it.

A wrong position, a lost row or a bad rollback shows in the output.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from specrt.engines.interface import Array

VOCAB_SIZE = 4096  # so large that the tokens of a short continuation differ


def hashed(seed: int, vocab_size: int = VOCAB_SIZE, memory: int = 0) -> Callable[[Sequence[int]], int]:
    """A token that depends on the last ``memory`` tokens, or on all of them when that is 0."""

    def next_token(prefix: Sequence[int]) -> int:
        data = array("q", prefix[-memory:]).tobytes()
        return (
            int.from_bytes(hashlib.blake2b(data, digest_size=4, key=seed.to_bytes(4, "big")).digest(), "big")
            % vocab_size
        )

    return next_token


Logits = Callable[[Sequence[int]], Array]


def hashed_logits(seed: int, vocab_size: int, memory: int = 0) -> Logits:
    """Logits [V] f32 (the first again beyond 64 ids), multiples of 1/32 in -4 .. 4 (so that ties occur)."""

    @lru_cache(maxsize=100_000)
    def row(context: tuple[int, ...]) -> Array:
        data = array("q", context).tobytes()
        digest = hashlib.blake2b(data, digest_size=min(vocab_size, 64), key=seed.to_bytes(4, "big")).digest()
        logits = np.resize(np.frombuffer(digest, np.uint8), vocab_size).astype(np.float32) / 32 - 4
        logits.flags.writeable = False
        return logits

    return lambda prefix: row(tuple(prefix[-memory:]))


def noisy(table: Logits, seed: int, vocab_size: int, amount: float = 0.25) -> Logits:
    """``table`` and some noise, of another number of ids where ``vocab_size`` is not the table's."""
    noise = hashed_logits(seed, vocab_size)

    def logits(prefix: Sequence[int]) -> Array:
        changed = np.float32(amount) * noise(prefix)
        own = table(prefix)[:vocab_size]
        changed[: len(own)] += own
        return changed

    return logits
