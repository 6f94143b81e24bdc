"""A busy machine flatters whoever waits least: it is noticed before a bench, and while it runs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from specrt.tools.bench.records import Bench
from specrt.tools.bench.tables import print_bench, remarks
from specrt.tools.machine import (
    BANDWIDTH_TRIES,
    CACHED_BYTES,
    QUIET_PERCENT,
    Machine,
    Watch,
    _cpu_seconds,
    bounding_bandwidth,
    memory_bound,
    notes,
)
from tests.tools.bench.benches import MACHINE


def test_a_machine_that_is_busy_before_is_reported() -> None:
    assert len(notes(MACHINE, [1, 2], False)) == 1
    busy = Machine("a CPU", 2, 1, 55.0, "PASSIVE", {})
    assert "these times are unreliable" in notes(busy, [1], False)[1]
    assert "OMP_WAIT_POLICY PASSIVE" in str(busy)


@pytest.mark.parametrize(
    ("later", "percent"),
    [
        ((120.0, 50.0, 30.0), 0.0),  # 20 s of the cores, all 20 that were busy were ours
        ((120.0, 45.0, 20.0), 25.0),  # of 15 busy ones 10 were
        ((120.0, 30.0, 20.0), 0.0),  # clocks that disagree
        ((100.0, 30.0, 10.0), 0.0),  # no time has passed
    ],
)
def test_others_are_busy_with_what_neither_we_nor_our_processes_took(
    later: tuple[float, float, float], percent: float
) -> None:
    readings = iter([(100.0, 30.0, 10.0), later])
    assert Watch(lambda: next(readings)).busy_percent() == percent


def test_a_process_of_ours_that_has_ended_is_ours() -> None:
    total, busy, own = _cpu_seconds()
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    later = _cpu_seconds()
    assert later[2] - own > 0.25 and later[0] > total and later[1] > busy


def test_a_bench_next_to_other_programs_warns_at_every_ratio(
    benched: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = replace(benched, busy_percent_during=QUIET_PERCENT)
    busy = replace(benched, busy_percent_during=60.0)
    assert not any("unreliable" in line for line in remarks(quiet))
    assert "60 % while it ran: these times are unreliable" in remarks(busy)[-1]


def test_a_bandwidth_that_a_pass_beats_is_measured_again() -> None:
    """Busy, then quiet: the second reading counts. Busy throughout: the largest reading, which bounds nothing."""
    readings = iter([14e9, 30e9, 99e9])
    assert bounding_bandwidth(27e9, 1, lambda threads: next(readings)) == (30e9, True)
    assert next(readings) == 99e9
    readings = iter([14e9, 16e9, 15e9][:BANDWIDTH_TRIES])
    assert bounding_bandwidth(27e9, 1, lambda threads: next(readings)) == (16e9, False)
    assert next(readings, None) is None


def test_no_bound_is_shown_that_a_pass_beats(benched: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights of 270 MB in 10 ms, with 14 GB/s measured: half of what would be the bound. The control: 30 GB/s."""
    assert benched.passes is not None and benched.passes.bandwidth_bytes_per_s is None  # a tiny model stays in caches
    shown = {}
    for bandwidth in (14e9, 30e9):
        bound = 270e6 / bandwidth * 1e3 if bandwidth > 27e9 else None
        passes = replace(benched.passes, target_ms=(10.0, 11.0), bandwidth_bytes_per_s=bandwidth, bound_ms=bound)
        print_bench(replace(benched, passes=passes))
        shown[bandwidth] = capsys.readouterr().out
    assert "over the bound" not in shown[14e9]
    assert "(14.0 GB/s) allows, so the machine was busy when it was measured" in shown[14e9]
    assert "over the bound" in shown[30e9] and "bound is 9.0 ms at 30.0 GB/s" in shown[30e9]
    assert "no memory bound" not in shown[30e9]


def test_the_bound_of_a_pass_follows_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    readings: list[float] = []
    monkeypatch.setattr("specrt.tools.machine.bounding_bandwidth.__defaults__", (lambda threads: readings.pop(),))
    readings += [30e9]
    assert memory_bound(300_000_000, 12.0, 1) == (30e9, 10.0)
    readings += [14e9] * BANDWIDTH_TRIES
    assert memory_bound(270_000_000, 10.0, 1) == (14e9, None)
    assert memory_bound(CACHED_BYTES - 1, 10.0, 1) == (None, None)
