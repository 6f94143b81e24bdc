"""``python -m specrt.tools.lab.gpu_rounds BUNDLE``: the time of a round on a GPU, and the host's share of it.

Measures plain decoding, the bundle's own drafts at each K, and v(M) of bare target passes. ``host`` is the time of a
round without waiting: enqueueing, verifying, committing. ``launches`` is the time between two runs of bindings without
a wait in between. If it is longer than a pass, the GPU idles; in rounds that are launched as CUDA graphs it is what the
host takes to prepare a pass.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console

import specrt
from specrt.engines.interface import DEVICES, Binding
from specrt.engines.progress import SILENT, Progress
from specrt.runtime.options import options_of
from specrt.runtime.runtime import Runtime
from specrt.runtime.settings import settings_of
from specrt.runtime.slots import Slot
from specrt.tools.rounds import run_rounds
from specrt.tools.terminal.failure import Tool
from specrt.tools.terminal.process import run_process
from specrt.tools.terminal.progress import shown_progress
from specrt.tools.terminal.tables import figures_table
from specrt.tools.tune.timing import time_passes

PROMPT = "def fibonacci(n):\n    "


@dataclass
class Watch:
    """Records when bindings run and how long reads wait."""

    waited_s: float = 0.0
    launches_s: list[float] = field(default_factory=list)
    _last: float | None = None

    def wrap(self, binding: Binding) -> None:
        """Record the runs and reads of a binding while it is open."""
        run, read = binding.run, binding.read

        def watched_run(width: int, rows: int) -> None:
            now = time.perf_counter()
            if self._last is not None:
                self.launches_s.append(now - self._last)
            self._last = now
            run(width, rows)

        def watched_read(*names: str) -> Any:
            started = time.perf_counter()
            found = read(*names)
            self.waited_s += time.perf_counter() - started
            self._last = None
            return found

        binding.run, binding.read = watched_run, watched_read  # type: ignore[method-assign]


@dataclass(frozen=True)
class Figures:
    """One way to decode. Times are ms per round; ``launch_us`` is the median time between two runs without a wait."""

    way: str
    tokens_per_s: float
    tokens_per_round: float
    round_ms: float
    host_ms: float
    launch_us: float


def measure_way(runtime: Runtime, slot: Slot, watch: Watch, k: int, num_tokens: int) -> Figures:
    """Decode after a prompt, once to warm up and once to measure, without the prefill."""
    given: Any = {"max_new_tokens": num_tokens, "ignore_eos": True, "num_speculative_tokens": k}
    settings = settings_of(options_of(given), runtime.manifest)
    prompt = runtime.codec.encode(PROMPT)
    marks: list[tuple[float, float, int]] = []

    def note(tokens: Sequence[int], *_: object) -> None:
        marks.append((time.perf_counter(), watch.waited_s, len(tokens)))

    for _ in range(2):
        marks.clear()
        watch.launches_s.clear()
        run_rounds(runtime, slot, prompt, settings, note)
    (started, waited, first), (ended, waited_at_end, last) = marks[1], marks[-1]
    rounds, seconds = len(marks) - 2, ended - started
    return Figures(
        f"{settings.draft}, K = {k}" if k else "plain",
        (last - first) / seconds,
        (last - first) / rounds,
        seconds / rounds * 1e3,
        (seconds - waited_at_end + waited) / rounds * 1e3,
        median(watch.launches_s) * 1e6 if watch.launches_s else 0.0,
    )


def measure(bundle: Path, place: dict[str, Any], num_tokens: int, progress: Progress = SILENT) -> dict[str, Any]:
    """Figures of each way to decode, v(M), backend and device."""
    with specrt.load(bundle, **place) as runtime:
        manifest = runtime.manifest
        passes, draft_ms = time_passes(runtime)
        slot = runtime.open_slot("none" if manifest.draft.kind == "ngram" else "model")
        watch, most = Watch(), manifest.num_speculative_tokens
        for part in (slot.target, slot.draft):
            if part is not None:
                _watch_all(part, watch)
        found = []
        for k in sorted(k for k in {0, 1, 2, 4, most} if k <= most):
            progress.step(f"K = {k}")
            found.append(asdict(measure_way(runtime, slot, watch, k, num_tokens)))
        slot.close()
        place = {"backend": runtime.backend, "device": runtime.device}
    return {**place, "ways": found, "target_pass_ms": passes, "draft_pass_ms": draft_ms}


def _watch_all(part: Any, watch: Watch) -> None:
    """Watch the model, and every sampler once it is opened."""
    watch.wrap(part.model.binding)
    sampler = part.samplers.sampler
    watched: set[int] = set()

    def opened(*arguments: Any) -> Binding:
        binding: Binding = sampler(*arguments)
        if id(binding) not in watched:
            watched.add(id(binding))
            watch.wrap(binding)
        return binding

    part.samplers.sampler = opened


@click.command(cls=Tool)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--backend", help="One of the bundle's backends.  [default: its first]")
@click.option("--device", type=click.Choice(DEVICES), help="[default: cpu; with a TensorRT backend cuda]")
@click.option("--max-new-tokens", type=click.IntRange(16), default=128, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(bundle: Path, backend: str | None, device: str | None, max_new_tokens: int, as_json: bool) -> None:
    """Rounds of BUNDLE by K: tokens per second, the host's share, time between launches; v(M) of bare passes."""
    place = {"backend": backend, "device": device}
    with shown_progress() as progress:
        result = measure(bundle, place, max_new_tokens, progress)
    if as_json:
        click.echo(json.dumps(result))
        return
    ways = (way.values() for way in result["ways"])
    rows = [[name, *(f"{figure:.2f}" for figure in figures)] for name, *figures in ways]
    headings = ("way", "tokens/s", "tokens per round", "round ms", "host ms", "between launches us")
    Console().print(figures_table(f"{result['backend']} on {result['device']}", headings, rows))
    first = result["target_pass_ms"][0]
    click.echo(f"T(1) {first:.2f} ms, draft {result['draft_pass_ms']:.2f} ms; v(M), M = 1 ...: ", nl=False)
    click.echo(" ".join(f"{ms / first:.2f}" for ms in result["target_pass_ms"]))


if __name__ == "__main__":
    run_process(lambda: main)
