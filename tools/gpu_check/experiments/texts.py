"""Whole texts on the GPU: ids, waits a round, memory in steady state, threads, stalls."""

from __future__ import annotations

import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from specrt.engines.errors import PlacementWarning, SpecrtError
from specrt.engines.gpu import device as gpu
from specrt.engines.interface import CUDA
from specrt.tools.gpu_check.experiment import Failed, Notes, Skip
from specrt.tools.gpu_check.experiments.places import Place, on_each, on_onnxruntime
from specrt.tools.gpu_check.kit import Kit

PROMPT = "The quick brown fox jumps over the lazy dog. The quick"
NUM_TOKENS = 48


def check_onnxruntime(kit: Kit, notes: Notes) -> None:
    """ONNX Runtime's CUDA provider: no node on the CPU, ids that speculation does not change, one wait a round."""
    if kit.onnxruntime is None:
        raise Skip("needs a bundle for ONNX Runtime in fp16")
    try:
        place = on_onnxruntime(kit.onnxruntime)
    except SpecrtError as error:
        raise Skip(str(error)) from error
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        notes.add("ids", _ids_of(place))
        notes.add("waits a round", _waits_of(place))
    if on_cpu := [str(line.message) for line in noted if issubclass(line.category, PlacementWarning)]:
        notes.add("graphs with nodes on the CPU", on_cpu)
        raise Failed(f"{len(on_cpu)} graphs are not on the GPU as a whole: {on_cpu[0]}")


def _draft_of(place: Place) -> str:
    return "ngram" if place.manifest.draft.model is None else "model"


def _open(place: Place) -> Any:
    import specrt

    return specrt.load(place.bundle, backend=place.name, device=CUDA)


def _generated(runtime: Any, draft: str, **options: Any) -> list[int]:
    options = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "draft": draft, "reproducible": True, **options}
    result: list[int] = runtime.generate(PROMPT, **options).token_ids
    return result


def _ids_of(place: Place) -> str:
    with _open(place) as runtime:
        plain, drafted = (_generated(runtime, draft) for draft in ("none", _draft_of(place)))
    if plain != drafted:
        raise Failed(f"speculation changes ids: {plain} alone, {drafted} with a draft")
    return f"{len(plain)} ids with a draft are those without one"


def _waits_of(place: Place) -> list[int]:
    """How often the host waits in each round of a greedy text, after the first rounds."""
    from specrt.runtime.options import options_of
    from specrt.runtime.settings import settings_of
    from specrt.tools.rounds import run_rounds

    slot_kind = "none" if place.manifest.draft.model is None else "model"
    api, waits, marks = gpu.open_device().api, [0], []
    real = api.wait

    def counted() -> None:
        waits[0] += 1
        real()

    api.wait = counted  # type: ignore[method-assign]
    try:
        with _open(place) as runtime:
            given: Any = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
            given["num_speculative_tokens"] = place.manifest.num_speculative_tokens
            settings, slot = settings_of(options_of(given), runtime.manifest), runtime.open_slot(slot_kind)
            run_rounds(runtime, slot, runtime.codec.encode(PROMPT), settings, lambda *_: marks.append(waits[0]))
            slot.close()
    finally:
        api.wait = real  # type: ignore[method-assign]
    found = [int(number) for number in np.diff(marks)[3:]]
    if set(found) != {1}:
        raise Failed(f"the host waits {found} times in the rounds of a text, expected once in each")
    return found


def check_memory(kit: Kit, notes: Notes) -> None:
    """Four threads with an adaptive K: equal ids, memory that does not grow, the longest round; a second load."""
    on_each(kit, notes, _steady_of)


def _steady_of(place: Place) -> dict[str, Any]:
    figures = _loads_of(place)
    with _open(place) as runtime:
        figures |= _threads_of(runtime, _draft_of(place))
    growth = figures["bytes that memory grew by in steady state"]
    if growth > 0 and not figures["graphs captured meanwhile"]:
        raise Failed(f"memory grew by {growth} bytes in steady state ({figures})")
    return {**figures, **_graphs_of(place)}


def _loads_of(place: Place) -> dict[str, Any]:
    """The time to the first text of two loads, the first of which finds no compiled kernels."""
    path = place.backend.cache_path
    if path is not None:
        path.unlink(missing_ok=True)
    figures: dict[str, Any] = {}
    written = []
    for load in ("first", "second"):
        started = time.perf_counter()
        with _open(place) as runtime:  # with a fixed K: passes of other widths would be compiled
            k = place.manifest.num_speculative_tokens
            _generated(runtime, _draft_of(place), max_new_tokens=8, num_speculative_tokens=k)
            figures[f"s to the first text of the {load} load"] = time.perf_counter() - started
        if path is not None:
            figures[f"bytes of compiled kernels after the {load} load"] = path.stat().st_size
            written.append(path.stat().st_mtime_ns)
    if len(set(written)) > 1:
        raise Failed(f"the second load did not take the first one's kernels: it wrote them again ({figures})")
    return figures


def _graphs_of(place: Place) -> dict[str, Any]:
    """Rounds that the runtime submits as CUDA graphs against single passes: equal ids, and ms a token."""
    kind, k = type(place.backend), place.manifest.num_speculative_tokens
    if not hasattr(kind, "uses_graphs"):
        return {}
    found: dict[str, tuple[list[int], float]] = {}
    for name, uses_graphs in (("graphs of rounds", True), ("no graphs", False)):
        kind.uses_graphs = uses_graphs
        try:
            with _open(place) as runtime:
                runtime.warm()
                started = time.perf_counter()
                ids = _generated(runtime, _draft_of(place), num_speculative_tokens=k)
                found[name] = ids, (time.perf_counter() - started) / len(ids) * 1e3
        finally:
            kind.uses_graphs = True
    (graphs, _), (single, _) = found.values()
    if graphs != single:
        raise Failed(f"rounds as CUDA graphs give {graphs}, single passes {single}")
    return {f"ms a token, {name}": ms for name, (_, ms) in found.items()}


@contextmanager
def _counted_captures() -> Iterator[list[int]]:
    """One entry for each capture. A K that comes late is captured late, and its graph takes memory."""
    api, noted = gpu.open_device().api, list[int]()
    real = api.capture

    def counted(enqueue: Callable[[], bool]) -> Any:
        noted.append(1)
        return real(enqueue)

    api.capture = counted  # type: ignore[method-assign]
    try:
        yield noted
    finally:
        api.capture = real  # type: ignore[method-assign]


def _threads_of(runtime: Any, draft: str) -> dict[str, Any]:
    found: list[list[int]] = []
    failures: list[str] = []
    intervals: list[float] = []

    def work() -> None:
        try:
            last = time.perf_counter()
            stream = runtime.stream(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True, draft=draft, reproducible=True)
            for _ in stream:
                now = time.perf_counter()
                intervals.append(now - last)
                last = now
            found.append(stream.result.token_ids)
        except Exception as error:  # of any kind: it is the answer
            failures.append(f"{type(error).__name__}: {error}")

    free, captures = [], []
    with _counted_captures() as noted:
        for _ in range(3):
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            free.append(gpu.open_device().api.free_memory())
            captures.append(len(noted))
    if failures or any(ids != found[0] for ids in found):
        raise Failed(failures[0] if failures else "threads give different ids for one prompt")
    return {
        "texts with equal ids": len(found),
        "bytes that memory grew by in steady state": free[1] - free[2],
        "graphs captured meanwhile": captures[2] - captures[1],
        "median ms between pieces": statistics.median(intervals) * 1e3,
        "longest ms between pieces": max(intervals) * 1e3,
    }
