"""``python -m specrt.tools.lab.overhead``: the time of the loop per round, and the time of imports.

The engines are fakes that measure their own time. The rest of a round is the loop: drafting by n-gram, writing inputs,
verifying, committing and rolling back, without streaming text.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import count

import click

from specrt.engines.fake import FakeEngine, FakeSampler, fake_spec
from specrt.engines.interface import Array
from specrt.runtime.completion import Completion
from specrt.runtime.drafting.adaptive import NGRAM_LENGTHS, AdaptiveDrafter, OnlineEstimates
from specrt.runtime.drafting.drafters import Drafter, NGramDrafter
from specrt.runtime.model import KVCachedModel
from specrt.runtime.round import generate_rounds
from specrt.runtime.sampling.samplers import SamplerEngines
from specrt.runtime.settings import Settings
from specrt.runtime.slots import SlotModel
from specrt.runtime.target import Target
from specrt.tools.terminal.failure import Tool
from specrt.tools.terminal.process import run_process

VOCAB_SIZE = 64
NUM_TOKENS = 2000
K = 5


class _Timed:
    """Adds up the time that the engines of a class spend in ``compute``."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, engine: FakeEngine | FakeSampler) -> None:
        compute = engine.compute

        def timed(host: Mapping[str, Array], width: int, rows: int) -> None:
            started = time.perf_counter()
            compute(host, width, rows)
            self.seconds += time.perf_counter() - started

        engine.compute = timed  # type: ignore[method-assign]


def next_token(prefix: Sequence[int]) -> int:
    """A repetitive text with occasional changes, so that drafts are accepted fully, partly or not at all."""
    position = len(prefix)
    return (position % 11 + position // 97) % VOCAB_SIZE


def loop_cost_us(drafter: Drafter) -> float:
    """Microseconds per round outside the engines."""
    spec = fake_spec(VOCAB_SIZE, NUM_TOKENS + 64, K)
    engine, sampler, clock = FakeEngine(spec, next_token), FakeSampler(spec), _Timed()
    clock.wrap(engine)
    clock.wrap(sampler)
    slot = SlotModel(KVCachedModel(engine, spec), SamplerEngines(lambda name: sampler))
    settings = Settings(NUM_TOKENS, K)
    target, completion = Target(slot, settings, 3), Completion([1, 2, 3], settings, spec.max_seq_len)
    started = time.perf_counter()
    num_rounds = sum(1 for _ in generate_rounds(completion, target, drafter)) - 1
    return (time.perf_counter() - started - clock.seconds) / num_rounds * 1e6


def _adaptive() -> Drafter:
    """The default drafter, with a clock on which every pass takes 10 ms, so that drafting is worthwhile."""
    estimates = OnlineEstimates.of(K, (0.05, 0.05), {"1": 10.0, str(K + 1): 12.0})
    return AdaptiveDrafter(
        NGramDrafter(NGRAM_LENGTHS[0], NGRAM_LENGTHS[-1]), None, estimates, clock=count(step=0.01).__next__
    )


def import_ms(statement: str) -> float:
    """Milliseconds of ``statement`` in a fresh interpreter, without the interpreter's start."""
    code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(7)]
    return statistics.median(float(run.stdout) for run in runs) * 1e3


@click.command(cls=Tool)
def main() -> None:
    """Measure the time of the loop and of imports."""
    for name, make in (("K fixed", NGramDrafter), ("K chosen by round", _adaptive)):
        costs = [loop_cost_us(make()) for _ in range(9)]
        median = statistics.median(costs)
        click.echo(f"loop, {name}: {median:.0f} us a round outside the engines (K = {K}, n-gram drafts, 9 runs)")
    click.echo(f"import specrt: {import_ms('import specrt'):.1f} ms")
    click.echo(f"import specrt.runtime.runtime: {import_ms('import specrt.runtime.runtime'):.0f} ms")


if __name__ == "__main__":
    run_process(lambda: main)
