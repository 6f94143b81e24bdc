"""The random numbers of a generation. They use Philox counters, so a draw depends only on its key.

``match`` keys its draws by the absolute position of the token. Draft draws and decisions of ``block`` are keyed by the
*round* (the number of committed tokens at its start): ``block`` uses drafted ids beyond the accepted ones, so drawing
again at the same position with the same numbers would bias the text.
"""

from __future__ import annotations

import numpy as np

from specrt.engines.interface import Array
from specrt.engines.samplers import NUM_UNIFORMS

POSITION, DRAFT, VERIFY = range(3)  # streams: independent sequences of one seed
MAX_SEED = 2**64 - 1
_WORDS = 4  # 64-bit words of one Philox counter


class Uniforms:
    """Uniforms in [0, 1) with 24 bits, exact in fp32, from ``seed`` (0 to 2**64 - 1)."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def at_positions(self, first: int, count: int) -> Array:
        """Uniforms of the absolute positions ``first .. first + count - 1``. [count, NUM_UNIFORMS] f32"""
        return self._rows(POSITION, (first, 0), count)

    def of_round(self, stream: int, num_committed: int, count: int) -> Array:
        """Uniforms of the round at ``num_committed`` tokens, of DRAFT or VERIFY. [count, NUM_UNIFORMS] f32"""
        return self._rows(stream, (0, num_committed), count)

    def _rows(self, stream: int, counter: tuple[int, int], count: int) -> Array:
        key = np.array([self._seed, stream], np.uint64)
        start = np.array([*counter, 0, 0], np.uint64)
        words = np.random.Philox(key=key, counter=start).random_raw(_WORDS * count)
        rows: Array = words.reshape(count, _WORDS)[:, :NUM_UNIFORMS]
        return (rows >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
