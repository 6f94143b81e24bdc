"""Which of the target's ids a head drafts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specrt.engines.interface import Array
from specrt.exporter.training.store import Store

_ALIGNMENT = 64
_DRAFTED = 3  # K for which an id is weighed
_GAIN = 0.4  # tokens of a round that are gained, relative, for each unit of covered frequency


@dataclass(frozen=True)
class DraftVocabulary:
    """``ids`` [D] i64, ascending. ``coverage``: their share of the tokens that the target wrote."""

    ids: Array
    coverage: float

    @property
    def offsets(self) -> Array:
        """``d2t`` [D] i64 of the head's files: id minus index."""
        return self.ids - np.arange(len(self.ids))


def choose_ids(store: Store, vocab_size: int, most: int, row_bytes: int, target_bytes: int) -> DraftVocabulary:
    """The frequent ids of the training text, at most ``most`` of them.

    An id is worth it if it occurs more than once, and its share of the text gains more tokens than reading its row of
    ``row_bytes`` costs in a round that reads ``target_bytes``. The target's own choices count as well as what it
    sampled. At least one alignment of ids is taken.
    """
    counts = np.zeros(vocab_size, np.int64)
    for entry in store.chosen(held_out=False):
        rows = store.rows(entry)
        for found in (rows.ids[rows.first_scored :], rows.top[rows.first_scored - 1 :]):
            counts += np.bincount(found, minlength=vocab_size)
    total = max(1, int(counts.sum()))
    least = max(2.0, _DRAFTED * row_bytes / target_bytes / _GAIN * total)
    num = -(-int((counts >= least).sum()) // _ALIGNMENT) * _ALIGNMENT
    num = min(max(num, _ALIGNMENT), most, vocab_size)
    ids = np.sort(np.argsort(-counts, kind="stable")[:num])
    return DraftVocabulary(ids.astype(np.int64), float(counts[ids].sum() / total))
