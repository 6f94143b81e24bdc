"""The soak: 10 seconds of it, a minute among the slow tests, and what it would find."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from specrt.tools.lab.soak import MAX_CONCURRENCY, MAX_GROWTH, Report, jobs_of, soak
from specrt.tools.lab.soak_clients import CLIENTS, Job


@pytest.fixture(scope="module")
def jobs(tiny_bundle: Path) -> list[Job]:
    return jobs_of(tiny_bundle)


def check(report: Report) -> None:
    assert report.problems == [] and report.exit_code == 0
    assert report.idle_slots == MAX_CONCURRENCY
    assert {name.partition(":")[0] for name in report.outcomes} == set(CLIENTS)
    texts = Counter({name: n for name, n in report.outcomes.items() if name.endswith("same text")})
    assert len(texts) == 3 and texts.total() > 10


def test_bad_clients_cost_no_slot_and_change_no_text(tiny_bundle: Path, jobs: list[Job]) -> None:
    check(soak(tiny_bundle, jobs, seconds=10))


@pytest.mark.slow
def test_the_memory_is_flat(tiny_bundle: Path, jobs: list[Job]) -> None:
    report = soak(tiny_bundle, jobs, seconds=60)
    check(report)
    assert report.growth <= MAX_GROWTH


def test_another_text_would_be_found(tiny_bundle: Path, jobs: list[Job]) -> None:
    """The negative control."""
    report = soak(tiny_bundle, [replace(job, text=f"{job.text}!") for job in jobs], seconds=2)
    assert any("differs" in problem for problem in report.problems)


def test_growth_is_measured_after_a_warm_up() -> None:
    assert Report(rss_mb=[10.0, 100, 100, 100, 102]).growth == pytest.approx(0.02)
    assert Report(rss_mb=[10.0, 100, 100, 100, 100]).growth == 0
    assert Report(rss_mb=[10.0, 100, 120, 130, 150]).growth == pytest.approx(0.5)
