"""A busy machine flatters whoever waits least: it is noticed before a bench, and while it runs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from specrt.tools.bench.records import Bench
from specrt.tools.bench.tables import remarks
from specrt.tools.machine import QUIET_PERCENT, Machine, Watch, _cpu_seconds, notes
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


def test_a_bench_next_to_other_programs_says_so_wherever_it_says_a_ratio(
    benched: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = replace(benched, busy_percent_during=QUIET_PERCENT)
    busy = replace(benched, busy_percent_during=60.0)
    assert not any("unreliable" in line for line in remarks(quiet))
    assert "60 % while it ran: these times are unreliable" in remarks(busy)[-1]
