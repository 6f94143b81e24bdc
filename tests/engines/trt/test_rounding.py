"""Kernels that round by the number of rows, as GPUs have them: ids stay the target's own but for near ties, and are compared."""

from __future__ import annotations

from specrt.tools.verify.checks import Subject, check_bits, check_greedy, check_rows
from tests.engines.gpu.simulated_gpu import SimulatedGpu
from tests.engines.numpy_samplers.noisy_pair import PROMPT


def test_x(simulated: SimulatedGpu) -> None:
    for rounding in (0.0, 1e-5, 0.5):
        simulated.library.rounding = rounding
        with simulated.open() as runtime:
            subject = Subject(simulated.bundle, runtime, [runtime.codec.encode(PROMPT)], 16, 0)
            for check in (check_rows, check_bits, check_greedy):
                for c in check(subject):
                    print(rounding, c.name, c.passed, c.found, c.figures)
