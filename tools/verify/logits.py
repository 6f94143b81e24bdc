"""Logits of a model over given ids, and how far two sets of logits are apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from specrt.engines.contract import LOGITS, UNDRAFTED
from specrt.engines.interface import Array
from specrt.runtime.head import HeadModel
from specrt.runtime.model import KVCachedModel


def logits_of(model: KVCachedModel, ids: Sequence[int], width: int) -> Array:
    """Logits [N, V] f32 over ``ids`` in passes of ``width`` tokens on a growing cache, which is emptied first."""
    model.rollback(0)
    rows = []
    for start in range(0, len(ids), width):
        part = ids[start : start + width]
        model.feed(part, len(part))
        rows.append(model.read(LOGITS)[0][: len(part)].copy())
    return np.concatenate(rows)


def largest(logits: Array) -> float:
    """The largest magnitude, of ids that the model can choose."""
    return float(np.abs(logits[logits > UNDRAFTED]).max())


def read_features(model: KVCachedModel, stored: Mapping[str, Array]) -> None:
    """A head reads the features that are stored with its reference."""
    if isinstance(model, HeadModel):
        model.write_features(stored["features"])
