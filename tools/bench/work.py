"""The measurements of a bench: requests to each method, until the time is over."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specrt.engines.errors import SpecrtError
from specrt.engines.manifest import manifest_from_bundle
from specrt.engines.progress import Progress
from specrt.tools.bench.journal import Journal
from specrt.tools.bench.methods import Answer, Method, WorkerPool
from specrt.tools.bench.records import PAST, Passes, Settings
from specrt.tools.machine import memory_bound
from specrt.tools.plan.roofline import Rounds
from specrt.tools.prompting.prompts import Prompt

WARM_UP_TOKENS = 16
LEAST_TOKENS = 16
ENOUGH_PROMPTS = 24  # if time is short, answers are shortened until this number of prompts fits
SEED = 1
Block = tuple[int, int]  # repeat, prompt


@dataclass
class Work:
    """The planned answers and those so far; ``done`` are the blocks that every method answered."""

    bundle: Path
    settings: Settings
    prompts: Sequence[Prompt]
    ids: Sequence[Sequence[int]]
    journal: Journal
    progress: Progress
    started: float
    required: set[str] | None = None
    max_new_tokens: int = 0
    done: list[Block] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    passes: Passes | None = None
    replies: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run(self, groups: Sequence[Sequence[Method]], share: float) -> None:
        """Load processes and request answers until ``share`` of the budget is used. Later groups repeat it."""
        settings = self.settings
        methods = [method for group in groups for method in group]
        self.progress.step("loading " + ", ".join(method.name for method in methods))
        blocks = [(repeat, index) for repeat in range(settings.repeats) for index in range(len(self.ids))]
        with WorkerPool(self.bundle, groups, settings.threads, settings.sources, self.required) as pool:
            self.failed.update(pool.failed)
            self.replies.update(pool.started)
            speeds = [self._warm_up(pool, c) for c in methods if c.name not in self.failed]
            if all(method.name in self.failed for method in methods):
                return
            if self.passes is None:
                self._time_passes(pool, methods)
            is_first = not self.max_new_tokens
            if is_first:
                left_s = None if settings.budget_s is None else settings.budget_s * share - self._elapsed_s()
                num_prompts = min(len(self.ids), ENOUGH_PROMPTS)
                most = settings.max_new_tokens
                tokens = most if settings.keep_tokens else tokens_within(most, left_s, speeds, num_prompts)
                self.max_new_tokens = self.journal.settled("max_new_tokens", tokens)
            limit_s = settings.budget_s * share if settings.budget_s is not None and is_first else None
            self.done = self._ask_all(pool, methods, blocks if is_first else self.done, limit_s)

    def answers(self, methods: Sequence[Method], used: Sequence[int]) -> dict[str, list[list[Answer]]]:
        """The answers by method, prompt and repeat."""
        found = self.journal.answers
        repeats = {index: [r for r, i in self.done if i == index] for index in used}
        return {c.name: [[found[c.name, self.prompts[i].name, r] for r in repeats[i]] for i in used] for c in methods}

    def _elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def _ask_all(
        self, pool: WorkerPool, methods: Sequence[Method], blocks: Sequence[Block], limit_s: float | None
    ) -> list[Block]:
        """The blocks that all methods answered; those that are not expected to fit into ``limit_s`` are not started."""
        done: list[Block] = []
        longest_s = 0.0
        for repeat, index in blocks:
            if limit_s is not None and self._elapsed_s() + longest_s > limit_s:
                break
            if all(method.name in self.failed for method in methods):
                break
            began = time.monotonic()
            for method in order_of(methods, repeat, index):
                self._ask(pool, method, repeat, index)
            done.append((repeat, index))
            longest_s = max(longest_s, time.monotonic() - began)
        return done

    def _ask(self, pool: WorkerPool, method: Method, repeat: int, index: int) -> None:
        key = (method.name, self.prompts[index].name, repeat)
        if method.name in self.failed or key in self.journal.answers:
            return
        self.progress.step(f"{method.name}: prompt {index + 1} of {len(self.ids)}, repeat {repeat + 1}")
        settings = self.settings
        sampling = {"temperature": settings.temperature, "seed": SEED} if settings.temperature else {}
        limits = {"max_new_tokens": self.max_new_tokens, "ignore_eos": settings.ignore_eos, **sampling}
        self._guarded(method, lambda: self.journal.add(key, pool.ask(method, self.ids[index], settings.k, **limits)))

    def _warm_up(self, pool: WorkerPool, method: Method) -> float:
        """Seconds a token, of the second of two answers."""
        self.progress.step(f"{method.name}: warm-up")
        found: list[Answer] = []
        limits = {"max_new_tokens": WARM_UP_TOKENS, "ignore_eos": True}

        def ask() -> None:
            for _ in range(2):
                found.append(pool.ask(method, self.ids[0], self.settings.k, **limits))

        self._guarded(method, ask)
        return found[1].seconds / WARM_UP_TOKENS if found[1:] else 0.0

    def _guarded(self, method: Method, ask: Callable[[], None]) -> None:
        try:
            ask()
        except SpecrtError as error:
            if self.required is None or method.name in self.required:
                raise
            self.failed[method.name] = str(error)

    def _time_passes(self, pool: WorkerPool, methods: Sequence[Method]) -> None:
        ours = [c for c in methods if c.library == "specrt" and c.name not in self.failed]
        if not ours:
            return
        self.progress.step("timing passes and memory")
        times = pool.time_passes(ours[0], PAST)
        target_ms, draft_ms = times["target_ms"], times["draft_ms"]
        num_bytes = manifest_from_bundle(self.bundle).target.bytes_per_pass
        rounds = Rounds(target_ms[0], tuple(k * draft_ms + ms for k, ms in enumerate(target_ms)))
        self.passes = Passes(
            tuple(target_ms),
            draft_ms,
            *memory_bound(num_bytes, min(target_ms), self.settings.threads),
            {k: rounds.break_even(k) for k in range(1, len(target_ms))},
        )


def order_of(methods: Sequence[Method], repeat: int, index: int) -> list[Method]:
    """A random order for each block, the same in every run. A rotation would give a category one order each time."""
    order = list(methods)
    random.Random(f"{repeat} {index}").shuffle(order)
    return order


def tokens_within(most: int, left_s: float | None, seconds_per_token: Sequence[float], num_prompts: int) -> int:
    """The most tokens per answer with which all methods can answer all prompts once."""
    if left_s is None or not any(seconds_per_token):
        return most
    return max(min(most, LEAST_TOKENS), min(most, int(0.8 * left_s / (num_prompts * sum(seconds_per_token)))))
