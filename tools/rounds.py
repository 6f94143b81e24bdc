"""Rounds in a slot that the caller holds, for checks and measurements that inspect its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specrt.runtime.completion import Completion
from specrt.runtime.result import Stats
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
    """Generate in ``slot``; return all tokens (prompt included) and figures. ``between`` gets both after each round."""
    completion, stats = Completion(prompt, settings, runtime.manifest.target.spec.max_seq_len), Stats()
    for _ in runtime.rounds(slot, completion, stats):
        between(completion.tokens, stats)
    return completion.tokens, stats
