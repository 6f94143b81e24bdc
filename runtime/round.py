"""The round: draft, verify, commit, roll back. Devices and text stay outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from specrt.runtime.drafting.drafters import Drafter
from specrt.runtime.result import Stats
from specrt.runtime.target import Target


@dataclass(frozen=True)
class Limits:
    """When to stop: a set of ids that end the text, new tokens still wanted, and the target's context."""

    ending_ids: frozenset[int]
    max_new_tokens: int
    max_seq_len: int
    k: int


# Gets each token as it is committed; True ends the text there (a stop string is complete).
Watch = Callable[[int], bool]


def generate_tokens(
    tokens: list[int],
    target: Target,
    drafter: Drafter,
    limits: Limits,
    stats: Stats,
    watch: Watch = lambda token: False,
) -> Iterator[list[int]]:
    """Append to ``tokens`` (the prompt) round by round; yield what each round emitted. ``stats`` is kept exact.

    The first yield is the token of the prefill. ``stats.finish_reason`` is ``stop`` or ``length`` at the end. Between
    two yields the caches hold exactly the committed tokens but the newest (the draft's from the second yield on).
    """
    end = min(len(tokens) + limits.max_new_tokens, limits.max_seq_len)
    stats.prompt_tokens = len(tokens)
    stats.reused_prompt_tokens = target.model.kv_len
    if len(tokens) >= end:
        stats.finish_reason = "length"
        return
    commit = _Commit(tokens, end, limits, stats, watch)
    started = time.perf_counter()
    _, first = target.verify(tokens, ())
    stats.prefill_ms += _ms_since(started)
    yield commit([first])
    if stats.finish_reason is None and end - len(tokens) > 1:
        started = time.perf_counter()
        drafter.propose(tokens[:-1], 0)
        stats.prefill_ms += _ms_since(started)
    while stats.finish_reason is None:
        yield _round(tokens, target, drafter, min(limits.k, end - len(tokens) - 1), commit, stats)


def _round(tokens: list[int], target: Target, drafter: Drafter, k: int, commit: _Commit, stats: Stats) -> list[int]:
    started = time.perf_counter()
    drafted = drafter.propose(tokens, k) if k > 0 else []
    drafted_at = time.perf_counter()
    accepted, own = target.verify(tokens, drafted, drafter.is_sampled)
    verified_at = time.perf_counter()
    emitted = commit([*drafted[:accepted], own])
    target.rollback(len(tokens))
    drafter.rollback(len(tokens))
    stats.count_round(len(drafted), accepted, len(emitted))
    stats.draft_ms += (drafted_at - started) * 1e3
    stats.verify_ms += (verified_at - drafted_at) * 1e3
    return emitted


@dataclass(frozen=True)
class _Commit:
    """Appends token by token, up to the first that ends the text or the end; returns what was appended."""

    tokens: list[int]
    end: int
    limits: Limits
    stats: Stats
    watch: Watch

    def __call__(self, proposed: Sequence[int]) -> list[int]:
        emitted = []
        for token in proposed:
            self.tokens.append(token)
            emitted.append(token)
            self.stats.completion_tokens += 1
            if self.watch(token) or token in self.limits.ending_ids:
                self.stats.finish_reason = "stop"
                break
            if len(self.tokens) == self.end:
                self.stats.finish_reason = "length"
                break
        return emitted


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
