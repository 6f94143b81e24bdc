"""The parts of a quantized weight are computed on access, the integers again each time."""

from __future__ import annotations

import numpy as np

from specrt.engines.interface import Array
from specrt.exporter.quantization.parts import LazyParts


def test_small_parts_are_kept_and_integers_are_not() -> None:
    calls = []

    def make() -> tuple[Array, ...]:
        calls.append(1)
        return np.array([len(calls)]), np.array([2.0]), np.array([3])

    parts = LazyParts(make)
    assert calls == []
    assert (parts.zero_points().item(), parts.scales().item(), len(calls)) == (3, 2.0, 1)
    assert [parts.data().item(), parts.data().item()] == [2, 3]
    assert (parts.scales().item(), len(calls)) == (2.0, 3)
