"""Bare passes of an open bundle, timed: T(M) of the target and one token of the draft."""

from __future__ import annotations

import time
from statistics import median

from specrt.runtime.cached import CachedModel
from specrt.runtime.runtime import Runtime

FILLER = 5  # any id: the time of a pass does not depend on it


def time_passes(runtime: Runtime, past: int = 100, repeats: int = 7) -> tuple[list[float], float]:
    """Median ms of target passes of 1 ... K + 1 tokens after ``past`` cached ones, and of a draft pass of one.

    The draft's is 0 where drafts need no model. Widths take turns; each is run once before it counts.
    """
    manifest = runtime.manifest
    past = max(0, min(past, manifest.target.spec.max_seq_len - 1))
    slot = runtime.open_slot("none" if manifest.draft.kind == "ngram" else "model")
    models = [slot.target.model, *([slot.draft.model] if slot.draft is not None else [])]
    for model in models:
        model.prefill([FILLER] * past)
    cases = [(models[0], width) for width in range(1, manifest.num_speculative_tokens + 2)]
    cases += [(model, 1) for model in models[1:]]
    times: list[list[float]] = [[] for _ in cases]
    for repeat in range(repeats + 1):
        for (model, width), found in zip(cases, times, strict=True):
            ms = _pass_ms(model, width, past)
            if repeat:
                found.append(ms)
    slot.close()
    medians = [median(found) for found in times]
    return (medians[:-1], medians[-1]) if models[1:] else (medians, 0.0)


def _pass_ms(model: CachedModel, width: int, past: int) -> float:
    model.rollback(past)
    started = time.perf_counter()
    model.feed([FILLER] * width, min(width, model.spec.max_rows))
    model.read()  # waits, where a pass is still under way
    return (time.perf_counter() - started) * 1e3
