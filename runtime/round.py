"""The round: draft, verify, commit, roll back. Devices and text stay outside."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specrt.runtime.cached import CachedModel
from specrt.runtime.drafters import Drafter
from specrt.runtime.result import Stats


@dataclass(frozen=True)
class Limits:
    """When to stop: a set of EOS ids, new tokens still wanted, and the target's context."""

    eos_ids: frozenset[int]
    max_new_tokens: int
    max_seq_len: int
    k: int


def generate_tokens(
    tokens: list[int], target: CachedModel, drafter: Drafter | None, limits: Limits, stats: Stats
) -> Iterator[list[int]]:
    """Append to ``tokens`` (the prompt) round by round; yield what each round emitted. ``stats`` is kept exact.

    The first yield is the token of the prefill. ``stats.finish_reason`` is ``stop`` or ``length`` at the end. Between
    two yields the caches hold exactly the committed tokens but the newest.
    """
    end = min(len(tokens) + limits.max_new_tokens, limits.max_seq_len)
    stats.prompt_tokens = len(tokens)
    if len(tokens) >= end:
        stats.finish_reason = "length"
        return
    started = time.perf_counter()
    _, first = target.verify(tokens[target.kv_len :], 0)
    if drafter is not None and end - len(tokens) > 1:
        drafter.propose(tokens, 0)
    stats.prefill_ms += _ms_since(started)
    yield _commit(tokens, [first], end, limits.eos_ids, stats)
    while stats.finish_reason is None:
        k = min(limits.k, end - len(tokens) - 1) if drafter is not None else 0
        yield _round(tokens, target, drafter, k, end, limits.eos_ids, stats)


def _round(
    tokens: list[int],
    target: CachedModel,
    drafter: Drafter | None,
    k: int,
    end: int,
    eos_ids: frozenset[int],
    stats: Stats,
) -> list[int]:
    started = time.perf_counter()
    drafted = drafter.propose(tokens, k) if drafter is not None and k > 0 else []
    drafted_at = time.perf_counter()
    accepted, own = target.verify(tokens[target.kv_len :] + drafted, len(drafted))
    verified_at = time.perf_counter()
    emitted = _commit(tokens, [*drafted[:accepted], own], end, eos_ids, stats)
    target.rollback(len(tokens) - 1)
    if drafter is not None:
        drafter.commit(len(tokens))
    stats.count_round(len(drafted), accepted, len(emitted))
    stats.draft_ms += (drafted_at - started) * 1e3
    stats.verify_ms += (verified_at - drafted_at) * 1e3
    return emitted


def _commit(tokens: list[int], proposed: Sequence[int], end: int, eos_ids: frozenset[int], stats: Stats) -> list[int]:
    """Append token by token up to the first EOS or the end; return what was appended."""
    emitted = []
    for token in proposed:
        tokens.append(token)
        emitted.append(token)
        stats.completion_tokens += 1
        if token in eos_ids:
            stats.finish_reason = "stop"
            break
        if len(tokens) == end:
            stats.finish_reason = "length"
            break
    return emitted


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
