"""Whether passes of one row and of several rows round differently. If so, a text depends on its rounds."""

from __future__ import annotations

import numpy as np

from specrt.engines.contract import LOGITS
from specrt.engines.interface import Array
from specrt.runtime.model import KVCachedModel
from specrt.runtime.runtime import Runtime

NUM_TOKENS = 8
# Over the largest |logit|. fp32 kernels that sum in another order differ by less; kernels that round the activations of
# a row differently, such as some for int4 and w8a8, differ by more.
TOLERANCE = 1e-4


def needs_reproducible(runtime: Runtime) -> bool:
    """Whether passes of one row round differently from those of more rows, in the target."""
    vocab_size = runtime.manifest.target.spec.vocab_size
    ids = [(7919 * index + 101) % vocab_size for index in range(NUM_TOKENS)]
    slot = runtime.open_slot("none")
    try:
        model = slot.target.model
        single = _logits(model, ids, 1)
        widths = {2, min(NUM_TOKENS, model.spec.max_rows)}
        error = max(float(np.abs(_logits(model, ids, width) - single).max()) for width in widths)
    finally:
        slot.close()
    return not error <= TOLERANCE * float(np.abs(single).max())


def _logits(model: KVCachedModel, ids: list[int], width: int) -> Array:
    """[len(ids), V] f32, from passes of ``width`` tokens."""
    model.rollback(0)
    rows = []
    for start in range(0, len(ids), width):
        part = ids[start : start + width]
        model.feed(part, len(part))
        rows.append(np.array(model.read(LOGITS)[0][: len(part)], dtype=np.float32))
    return np.concatenate(rows)
