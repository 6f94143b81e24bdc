"""What checks of a model's logits need: their scale, and the features that a head reads."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from specrt.engines.contract import UNDRAFTED
from specrt.engines.interface import Array
from specrt.runtime.drafting.head import HeadModel
from specrt.runtime.model import KVCachedModel


def largest(logits: Array) -> float:
    """The largest magnitude, of ids that the model can choose."""
    return float(np.abs(logits[logits > UNDRAFTED]).max())


def read_features(model: KVCachedModel, stored: Mapping[str, Array]) -> None:
    """A head reads the features that are stored with its reference."""
    if isinstance(model, HeadModel):
        model.write_features(stored["features"])
