"""Passes of different widths over the same tokens: whether a row's logits depend on the rows that go with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specrt.engines.contract import LOGITS
from specrt.engines.errors import BackendError
from specrt.engines.interface import Array
from specrt.engines.manifest import ModelEntry
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


def require_equal_widths(backend: str, model: KVCachedModel, entry: ModelEntry, bundle: Path) -> None:
    """Test passes of 1 to ``max_rows`` rows over the ids of which the bundle stores the torch model's logits.

    All must agree with those logits within the entry's tolerance, and passes of two or more rows with each other to the
    last bit. Otherwise greedy text would depend on the drafts. Raises ``BackendError``.
    """
    stored = np.load(bundle / entry.reference)
    ids, expected = stored["ids"].tolist(), stored["logits"]  # [N], [P, V]
    found = {width: logits_of(model, ids, width) for width in range(1, entry.spec.max_rows + 1)}
    tolerance = entry.logits_tolerance * float(np.abs(expected).max())
    for width, logits in found.items():
        error = float(np.abs(logits[stored["positions"]] - expected).max())
        if not error <= tolerance:  # also where it is not a number
            raise BackendError(
                f"backend {backend}: passes of {width} tokens are {error:.2g} off the torch model's logits, expected "
                f"at most {tolerance:.2g}; use another backend"
            )
        if width > 2 and not np.array_equal(logits, found[2]):
            raise BackendError(
                f"backend {backend}: the bits of a row differ between passes of 2 and of {width} tokens, so that "
                "greedy text would depend on the drafts; use another backend"
            )
