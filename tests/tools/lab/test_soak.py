"""The soak: 10 seconds of it, a minute among the slow tests, and what it would find."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from specrt.tools.lab.soak import MAX_CONCURRENCY, MAX_GROWTH, Report, soak
from specrt.tools.lab.soak_clients import CLIENTS
from specrt.tools.lab.soak_jobs import CHAT, Job, jobs_of, with_tools


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a template that takes tools."""
    return with_tools(tiny_bundle, tmp_path_factory.mktemp("soak") / "bundle")


@pytest.fixture(scope="module")
def jobs(bundle: Path) -> list[Job]:
    return jobs_of(bundle)


def check(report: Report) -> None:
    assert report.problems == [] and report.exit_code == 0
    assert report.idle_slots == MAX_CONCURRENCY
    assert {name.partition(":")[0] for name in report.outcomes} == set(CLIENTS)
    for kind in ("same text", "same structured text"):
        texts = Counter({name: n for name, n in report.outcomes.items() if name.endswith(kind)})
        assert len(texts) >= 3 and texts.total() > 10, kind


def test_bad_clients_cost_no_slot_and_change_no_text(bundle: Path, jobs: list[Job]) -> None:
    check(soak(bundle, jobs, seconds=10))


@pytest.mark.slow
def test_the_memory_is_flat(bundle: Path, jobs: list[Job]) -> None:
    report = soak(bundle, jobs, seconds=60)
    check(report)
    assert report.growth <= MAX_GROWTH


def test_another_text_would_be_found(bundle: Path, jobs: list[Job]) -> None:
    """The negative control."""
    report = soak(bundle, [replace(job, text=f"{job.text}!") for job in jobs], seconds=2)
    assert any("differs" in problem for problem in report.problems)


def test_schemas_calls_and_plain_texts_are_in_the_mix(bundle: Path, jobs: list[Job]) -> None:
    texts = [job.text for job in jobs if job.path == CHAT]
    assert sum(text.startswith('{"city":') for text in texts) == 2
    assert sum(text.startswith(("go{", "tell{")) for text in texts) == 4
    assert len(jobs) == 32 and all(job.text for job in jobs)
    assert with_tools(bundle, Path("not/written")) == bundle, "its template takes tools already"


def test_growth_is_measured_after_a_warm_up_and_with_it() -> None:
    assert Report(rss_mb=[10.0, 100, 100, 100, 102]).growth == pytest.approx(0.02)
    assert Report(rss_mb=[10.0, 100, 100, 100, 100]).growth == 0
    assert Report(rss_mb=[10.0, 100, 120, 130, 150]).growth == pytest.approx(0.5)
    assert Report(rss_mb=[10.0, 100, 130, 100, 100]).growth == pytest.approx(0.3), "also in between"
    assert Report(rss_mb=[100.0] * 5 + [101] * 19 + [150]).whole_growth == pytest.approx(0.5)
    assert Report(rss_mb=[100.0] * 5 + [101] * 20).as_dict()["rss_mb"] == [100, 101, 100, 101, 101, 101, 101]
    assert Report(rss_mb=[100.0]).growth == Report(rss_mb=[100.0]).whole_growth == 0
