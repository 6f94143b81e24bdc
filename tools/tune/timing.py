"""Timed passes, including what follows each pass, for all measurements of pass times.

A target's pass includes verification: it ends when the result of the greedy sampler is on the host. A draft's pass ends
when its next token is on the host. Cases take turns, so that a slow moment of the machine affects all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

from specrt.engines.backends import open_backend
from specrt.engines.manifest import manifest_from_bundle
from specrt.runtime.runtime import Runtime
from specrt.runtime.settings import Settings
from specrt.runtime.slots import LoadedModel, SlotModel, sampler_engines
from specrt.runtime.target import Target

FILLER = 5  # any id: the time of a pass does not depend on it
Case = TypeVar("Case")


def medians_ms(cases: Mapping[Case, Callable[[], object]], repeats: int) -> dict[Case, float]:
    """Median ms of each case over ``repeats`` turns, after one turn that warms up."""
    times: dict[Case, list[float]] = {case: [] for case in cases}
    for repeat in range(repeats + 1):
        for case, run in cases.items():
            started = time.perf_counter()
            run()
            if repeat:
                times[case].append((time.perf_counter() - started) * 1e3)
    return {case: median(found) for case, found in times.items()}


def verifying(target: Target, past: int, widths: Iterable[int]) -> dict[int, Callable[[], object]]:
    """By width: a function that verifies that number of tokens after ``past`` cached ones, which are read now."""
    committed = [FILLER] * (past + 1)
    target.model.rollback(0)
    target.model.prefill(committed[:-1])

    def verify(width: int) -> tuple[int, int]:
        target.model.rollback(past)
        return target.verify(committed, [FILLER] * (width - 1))

    return {width: partial(verify, width) for width in widths}


def time_target(runtime: Runtime, past: int, repeats: int) -> dict[int, float]:
    """Median ms of verifying 1 ... K + 1 tokens after ``past`` cached ones, or up to the context's length."""
    slot = runtime.open_slot("none")
    room = _room(runtime, past)
    target, _ = runtime.begin(slot, [FILLER] * (room + 1), Settings())
    widths = range(1, runtime.manifest.num_speculative_tokens + 2)
    found = medians_ms(verifying(target, room, widths), repeats)
    slot.close()
    return found


def time_draft(runtime: Runtime, past: int, repeats: int, widths: Iterable[int] = (1,)) -> dict[int, float]:
    """Median ms until the draft model's next token, by the number of tokens it is fed. Empty without a draft model."""
    if runtime.manifest.draft.kind == "ngram":
        return {}
    slot = runtime.open_slot("model")
    committed = [FILLER] * _room(runtime, past)
    target, drafter = runtime.begin(slot, committed, Settings(num_speculative_tokens=1, draft="model"))
    assert slot.draft is not None
    model = slot.draft.model
    target.model.prefill(committed[:-1])  # a head reads its features
    model.prefill(model.missing(committed))
    num_fed = model.kv_len

    def draft(width: int) -> None:
        model.rollback(num_fed - width)
        drafter.propose(committed, 1)
        model.read()  # on a device the token is computed asynchronously: wait for it

    found = medians_ms({w: partial(draft, w) for w in widths if w < num_fed}, repeats)
    slot.close()
    return found


def time_passes(runtime: Runtime, past: int = 100, repeats: int = 7) -> tuple[list[float], float]:
    """(ms of verifying 1 ... K + 1 tokens, ms of a drafted token): the latter is 0 where drafts need no model."""
    target_ms = time_target(runtime, past, repeats)
    return [target_ms[width] for width in sorted(target_ms)], time_draft(runtime, past, repeats).get(1, 0.0)


def _room(runtime: Runtime, past: int) -> int:
    return max(1, min(past, runtime.manifest.target.spec.max_seq_len - runtime.manifest.num_speculative_tokens - 1))


def open_target(bundle: Path, threads: int, backend: str | None = None, device: str | None = None) -> Target:
    """The target of a bundle on a new slot, with greedy verification."""
    manifest = manifest_from_bundle(bundle)
    opened, entry = open_backend(bundle, manifest, backend, device, threads), manifest.target
    engines = sampler_engines(opened, entry, entry.spec.max_rows, entry.spec.vocab_size)
    return Target(SlotModel(LoadedModel(opened, entry).open(), engines), Settings(), 0)


def measure_targets(
    bundles: list[Path],
    widths: list[int],
    past: int,
    repeats: int,
    threads: int,
    backend: str | None = None,
    device: str | None = None,
) -> dict[str, dict[int, float]]:
    """Median ms of a pass, by bundle and width; passes of all bundles take turns."""
    by_bundle = {
        str(bundle): verifying(open_target(bundle, threads, backend, device), past, widths) for bundle in bundles
    }
    cases = {(name, width): passes[width] for width in widths for name, passes in by_bundle.items()}
    found = medians_ms(cases, repeats)
    return {name: {width: found[name, width] for width in widths} for name in by_bundle}
