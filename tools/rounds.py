"""Rounds in a slot that the caller holds, for checks and measurements that inspect its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specrt.runtime.result import Stats
from specrt.runtime.round import Limits, generate_tokens
from specrt.runtime.runtime import Runtime
from specrt.runtime.settings import Settings
from specrt.runtime.slots import Slot


def run_rounds(
    runtime: Runtime,
    slot: Slot,
    prompt: Sequence[int],
    settings: Settings,
    between: Callable[[list[int], Stats], None] = lambda tokens, stats: None,
) -> tuple[list[int], Stats]:
    """Generate in ``slot``; return all tokens, prompt included, and statistics. ``between`` gets both each round."""
    tokens, stats = list(prompt), Stats()
    target, drafter = runtime.begin(slot, tokens, settings)
    limits = Limits(
        frozenset(settings.ending_ids),
        settings.max_new_tokens,
        runtime.manifest.target.spec.max_seq_len,
        settings.num_speculative_tokens,
    )
    for _ in generate_tokens(tokens, target, drafter, limits, stats):
        between(tokens, stats)
    return tokens, stats
