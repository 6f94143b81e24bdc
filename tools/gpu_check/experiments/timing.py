"""Times of passes on the device, by the marks of a binding."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np

from specrt.engines.contract import LOGITS
from specrt.engines.interface import Binding, write_pass

REPEATS, RUNS = 5, 10


def pass_ms(binding: Binding, width: int, start: int = 0) -> float:
    """Median of the device's time of a pass of ``width`` tokens and rows after ``start`` cached ones, in ms."""
    write_pass(binding.host, np.zeros(width, np.int64), start, width)
    binding.upload()
    return median(_timed(binding, lambda: binding.run(width, width)) for _ in range(1 + REPEATS))


def _timed(binding: Binding, enqueue: Callable[[], object]) -> float:
    for _ in range(3):
        enqueue()
    binding.read(LOGITS)
    binding.mark(0)
    for _ in range(RUNS):
        enqueue()
    binding.mark(1)
    binding.read(LOGITS)
    return float(binding.elapsed_ms() or 0.0) / RUNS


def host_us(binding: Binding, width: int, num_runs: int = 50) -> float:
    """What the host takes to enqueue a pass, in us, without a wait in between."""
    binding.read(LOGITS)
    started = time.perf_counter()
    for _ in range(num_runs):
        binding.run(width, width)
    seconds = time.perf_counter() - started
    binding.read(LOGITS)
    return seconds / num_runs * 1e6
