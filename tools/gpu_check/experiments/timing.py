"""Times of passes on the device, by the marks of a binding."""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from specrt.engines.contract import LOGITS
from specrt.engines.interface import Binding, write_pass
from specrt.tools.gpu_check.experiment import Failed

REPEATS, RUNS = 5, 10


def pass_ms(binding: Binding, width: int, start: int = 0, rows: int | None = None, runs: int = RUNS) -> float:
    """Median of the device's ms for a pass of ``width`` tokens after ``start`` cached ones, of ``runs`` in a row.

    Without ``rows``, there are as many as tokens. One run alone takes longer by the time until its launch.
    """
    rows = width if rows is None else rows
    write_pass(binding.host, np.zeros(width, np.int64), start, rows)
    binding.upload()
    for _ in range(3):  # the second may be captured as a CUDA graph
        binding.run(width, rows)
    return median(_timed(binding, width, rows, runs) for _ in range(1 + REPEATS))


def _timed(binding: Binding, width: int, rows: int, runs: int) -> float:
    binding.read(LOGITS)
    binding.mark(0)
    for _ in range(runs):
        binding.run(width, rows)
    binding.mark(1)
    binding.read(LOGITS)
    elapsed = binding.elapsed_ms()
    if not elapsed:
        raise Failed(f"events: {elapsed} ms between the marks around {runs} passes")
    return elapsed / runs


def host_us(binding: Binding, width: int, num_runs: int = 50) -> float:
    """What the host takes to enqueue a pass, in us, without a wait in between."""
    binding.read(LOGITS)
    started = time.perf_counter()
    for _ in range(num_runs):
        binding.run(width, width)
    seconds = time.perf_counter() - started
    binding.read(LOGITS)
    return seconds / num_runs * 1e6
