"""``python -m specrt.tools.lab.sampler_share BUNDLE``: what the heads cost of a round, by rule and settings.

A round's time is split into the models' passes and the rest: heads, uniforms, and the loop itself. Settings take turns
on the same prompt.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

import specrt
from specrt.engines.processor import available_cores
from specrt.engines.samplers import BLOCK, MATCH, TOKEN
from specrt.engines.storage.files import write_text_file
from specrt.runtime.model import CachedModel
from specrt.runtime.result import Stats
from specrt.runtime.runtime import Runtime
from specrt.runtime.settings import Settings
from specrt.tools.machine import describe_machine
from specrt.tools.prompting.prompts import choose_prompts, encode_prompts
from specrt.tools.rounds import run_rounds
from specrt.tools.terminal.failure import Tool
from specrt.tools.terminal.outputs import OUTPUT_FILE
from specrt.tools.terminal.process import run_process


@dataclass
class Clock:
    """Wraps the passes of the models of a slot, and adds up their time."""

    seconds: float = 0.0
    rounds_ms: list[float] = field(default_factory=list)
    heads_ms: list[float] = field(default_factory=list)

    def wrap(self, model: CachedModel) -> None:
        run = model.binding.run

        def timed(width: int, rows: int) -> None:
            started = time.perf_counter()
            run(width, rows)
            self.seconds += time.perf_counter() - started

        model.binding.run = timed  # type: ignore[method-assign]


def cases(k: int, has_draft: bool) -> dict[str, Settings]:
    """What is measured, by name."""
    draft = "model" if has_draft else "ngram"
    rules = (MATCH, TOKEN, BLOCK) if has_draft else (MATCH,)
    sampled = {f"{rule}, T 0.7": Settings(64, k, draft, rule, 0.7, seed=1) for rule in rules}
    filtered = {f"{rule}, T 0.7, top-p 0.95": Settings(64, k, draft, rule, 0.7, top_p=0.95, seed=1) for rule in rules}
    penalized = {f"{MATCH}, greedy, repetition 1.1": Settings(64, k, draft, repetition_penalty=1.1)}
    return {f"{MATCH}, greedy": Settings(64, k, draft), **sampled, **filtered, **penalized}


def _splitter(clock: Clock, kept: Clock, k: int) -> Callable[[list[int], Stats], None]:
    """What to call after each round: it keeps the times of full rounds."""
    started, drafted, clock.seconds = time.perf_counter(), 0, 0.0

    def between(tokens: list[int], stats: Stats) -> None:
        nonlocal started, drafted
        now = time.perf_counter()
        if stats.rounds > 1 and stats.drafted - drafted == k:
            kept.rounds_ms.append((now - started) * 1e3)
            kept.heads_ms.append((now - started - clock.seconds) * 1e3)
        clock.seconds, drafted = 0.0, stats.drafted
        started = time.perf_counter()

    return between


def measure(runtime: Runtime, prompt: Sequence[int], repeats: int) -> dict[str, tuple[float, float, int]]:
    """(median ms of a round, median ms of it outside the models' passes, rounds) by case; only full rounds count."""
    manifest = runtime.manifest
    has_draft = manifest.draft.kind != "ngram"
    slot = runtime.open_slot("model" if has_draft else "none")
    clock, by_case = Clock(), cases(manifest.num_speculative_tokens, has_draft)
    clock.wrap(slot.target.model)
    if slot.draft is not None:
        clock.wrap(slot.draft.model)
    found: dict[str, Clock] = {name: Clock() for name in by_case}
    for repeat in range(repeats + 1):
        for name, settings in by_case.items():
            kept = found[name] if repeat else Clock()  # the first time warms up
            run_rounds(runtime, slot, prompt, settings, _splitter(clock, kept, settings.num_speculative_tokens))
    slot.close()
    return {
        name: (statistics.median(case.rounds_ms), statistics.median(case.heads_ms), len(case.rounds_ms))
        for name, case in found.items()
        if case.rounds_ms
    }


@click.command(cls=Tool)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@click.option("--threads", type=click.IntRange(1), help="[default: the cores this process may use]")
@click.option("--json", "json_file", type=OUTPUT_FILE, help="Write everything to this file.")
def main(bundle: Path, repeats: int, threads: int | None, json_file: Path | None) -> None:
    """Measure the heads' share of BUNDLE's rounds, with its K and its draft."""
    console = Console(highlight=False, soft_wrap=True)
    with specrt.load(bundle, threads=threads) as runtime:
        prompts = choose_prompts("rewriting")
        (prompt,) = encode_prompts(prompts, bundle, runtime.manifest, 64)
        found = measure(runtime, prompt, repeats)
        vocab_size, k = runtime.manifest.target.spec.vocab_size, runtime.manifest.num_speculative_tokens
    console.print(str(describe_machine(threads or available_cores(), watch_seconds=0.0)))
    table = Table(title=f"{bundle}, K = {k}, vocabulary {vocab_size}", title_justify="left")
    for heading in ("rule and settings", "rounds", "ms a round", "ms outside the passes", "share"):
        table.add_column(heading, justify="left" if heading.startswith("rule") else "right")
    for name, (round_ms, heads_ms, rounds) in found.items():
        table.add_row(name, str(rounds), f"{round_ms:.1f}", f"{heads_ms:.2f}", f"{heads_ms / round_ms:.1%}")
    console.print(table)
    if json_file is not None:
        write_text_file(json_file, json.dumps(found) + "\n")


if __name__ == "__main__":
    run_process(lambda: main, restarts=True)
