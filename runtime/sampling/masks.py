"""Bit masks of allowed ids from llguidance, and their use on rows of logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrt.engines.contract import UNDRAFTED
from specrt.engines.interface import Array

# For each byte of a mask, the upper limits of its 8 ids: infinity or minus infinity. [256, 8] f32
_LIMITS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf
).astype(np.float32)


class Mask:
    """Allowed ids as bits, the lowest first [ceil((V + 1) / 8)] u8. Bit V is set if the text may end.

    Then ``eos_token_ids`` are allowed too. ``is_end``: the text may end, and no other id may follow.
    """

    def __init__(self, bits: Array, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.bits, self._vocab_size = bits, vocab_size
        may_end = self.allows(vocab_size)
        bits[vocab_size >> 3] &= ~np.uint8(1 << (vocab_size & 7))
        num_ids = int(np.bitwise_count(bits.view(np.uint32)).sum())
        self.is_end = may_end and num_ids == 0
        self.only: int | None = None
        if may_end and eos_token_ids:
            for token in eos_token_ids:
                bits[token >> 3] |= np.uint8(1 << (token & 7))
        elif num_ids == 1:
            byte = int(bits.argmax())
            self.only = 8 * byte + int(bits[byte]).bit_length() - 1

    def allows(self, token: int) -> bool:
        """Whether ``token`` may follow."""
        return bool(self.bits[token >> 3] >> (token & 7) & 1)


class MaskedRows:
    """Applies masks to rows, one at a time, with memory that is allocated once."""

    def __init__(self) -> None:
        self._limits = np.empty((0, 8), np.float32)

    def apply(self, mask: Mask, row: Array) -> bool:
        """Set the logits of ids that are forbidden or beyond the mask to minus infinity. ``row`` [V] f32.

        False if no id is allowed that the model may choose; ``row`` is then not changed.
        """
        if len(self._limits) != len(mask.bits):
            self._limits = np.empty((len(mask.bits), 8), np.float32)
        np.take(_LIMITS, mask.bits, axis=0, out=self._limits, mode="clip")
        limits = self._limits.reshape(-1)[: len(row)]
        np.minimum(row[: len(limits)], limits, out=limits)
        if not UNDRAFTED < limits.max() < np.inf:
            return False
        row[: len(limits)] = limits
        row[len(limits) :] = -np.inf
        return True
