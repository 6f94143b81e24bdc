"""longrope: one set of rotary factors for all positions, chosen by the context of the bundle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_LONGROPE = "longrope"


@contextmanager
def fixed_longrope(model: Any, max_seq_len: int) -> Iterator[None]:
    """Inside the block ``model`` has the factors of texts of ``max_seq_len`` tokens at all positions.

    transformers changes the factors of all positions when a text becomes longer than the original context. Keys in a
    KV cache were rotated before that and cannot change.
    """
    modules = _modules(model)
    for module in modules:
        module(torch.zeros(1, dtype=torch.float32), torch.tensor([[max_seq_len - 1]]))
        module.rope_type = "default"
    try:
        yield
    finally:
        for module in modules:
            module.rope_type = _LONGROPE


def longrope_note(model: Any, max_seq_len: int) -> str | None:
    """A line for the user when short texts are rotated otherwise than in transformers; else None."""
    originals = [module.config.rope_parameters["original_max_position_embeddings"] for module in _modules(model)]
    if not originals or max_seq_len <= min(originals):
        return None
    return (
        f"rope scaling is longrope: a context of {max_seq_len} uses the long factors for texts of every length; "
        f"transformers uses the short ones up to {min(originals)} tokens; --max-seq-len {min(originals)} does that"
    )


def _modules(model: Any) -> list[Any]:
    return [module for module in model.modules() if getattr(module, "rope_type", None) == _LONGROPE]
