"""Whether passes of one row and of several rows round differently. If so, a text depends on its rounds."""

from __future__ import annotations

import numpy as np

from specrt.runtime.runtime import Runtime
from specrt.runtime.widths import logits_of

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
        single = logits_of(model, ids, 1)
        widths = {2, min(NUM_TOKENS, model.spec.max_rows)}
        error = max(float(np.abs(logits_of(model, ids, width) - single).max()) for width in widths)
    finally:
        slot.close()
    return not error <= TOLERANCE * float(np.abs(single).max())
