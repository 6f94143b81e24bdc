"""Kernels that round by the number of rows, as a GPU's may: checks that need equal bits report it, others hold."""

from __future__ import annotations

from specrt.tools.verify.checks import Subject, check_bits, check_greedy, check_rows
from tests.engines.gpu.simulated_gpu import SimulatedGpu
from tests.engines.numpy_samplers.noisy_pair import PROMPT


def verdicts(simulated: SimulatedGpu, rounding: float) -> tuple[bool, bool, bool]:
    """Whether rows, bits and greedy ids of the target pass."""
    simulated.library.rounding = rounding
    with simulated.open() as runtime:
        subject = Subject(simulated.bundle, runtime, [runtime.codec.encode(PROMPT)], 8, 0)
        rows, bits, greedy = (check(subject) for check in (check_rows, check_bits, check_greedy))
    return rows[0].passed, bits[0].passed, all(check.passed for check in greedy)


def test_rounding_by_width_costs_equal_bits_and_nothing_else(simulated: SimulatedGpu) -> None:
    assert verdicts(simulated, 0.0) == (True, True, True)
    assert verdicts(simulated, 1e-5) == (True, False, True)


def test_what_is_more_than_rounding_fails(simulated: SimulatedGpu) -> None:
    rows, bits, _ = verdicts(simulated, 0.3)
    assert (rows, bits) == (False, False)
