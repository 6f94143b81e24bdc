"""The README's pictures: what the committed results give, readable on any background."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from specrt.tools.report.speed_chart import GREY, SHOWN, chart_of, main

DOCS = Path(__file__).parents[3] / "docs"
RESULTS = DOCS / "reports" / "smollm2.json"
SVG = "{http://www.w3.org/2000/svg}"


def row(method: str, speed: float, interval: list[float] | None = None, rate: float | None = None) -> dict[str, Any]:
    return {
        "method": method,
        "tokens_per_s": speed,
        "ratio_to": {"eager": speed / 10},
        "interval_of": {"eager": interval},
        "draft_acceptance_rate": rate,
    }


@pytest.fixture
def bench() -> dict[str, Any]:
    return {
        "bundle": "a <model>",
        "settings": {"max_new_tokens": 32},
        "machine": {"cpu": "A CPU", "threads": 2, "busy_percent_before": 3.0},
        "busy_percent_during": 4.0,
        "prompts": [{"category": "chat"}, {"category": "math"}],
        "created_utc": "2026-11-30T04:00:00+00:00",
        "scores": [row("eager", 10.0), row("plain", 20.0, [1.8, 2.2]), row("auto", 40.0, [3.5, 5.0], 0.9)],
    }


def test_bars_are_as_long_as_methods_are_fast(bench: dict[str, Any]) -> None:
    """A method that the bench lacks has no bar. The longest interval ends where the space for bars does."""
    tree = ET.fromstring(chart_of(bench, SHOWN.split(",")))
    widths = [float(bar.attrib["width"]) for bar in tree.iter(f"{SVG}rect")]
    assert widths == pytest.approx([widths[0], 2 * widths[0], 4 * widths[0]], abs=0.1)
    (plain, auto) = dict.fromkeys(path.attrib["d"] for path in tree.iter(f"{SVG}path"))
    low, high = map(float, re.findall(r"M([\d.]+) .*H([\d.]+)", auto)[0])
    assert (high - low) / widths[0] == pytest.approx(1.5, abs=0.01) and plain != auto
    texts = [text.text for text in tree.iter(f"{SVG}text")]
    assert "specrt speculative" in texts and "40.0 (4.0x eager)" in texts and "a <model>" in texts
    assert not any("GenAI" in (text or "") for text in texts)


def test_a_chart_of_a_busy_machine_has_a_warning(bench: dict[str, Any]) -> None:
    assert "UNRELIABLE" not in chart_of(bench, ["eager"])
    assert "UNRELIABLE: other programs kept the CPU 60 % busy" in chart_of(
        {**bench, "busy_percent_during": 60.0}, ["eager"]
    )


def test_the_picture_in_the_repository_is_of_the_results_in_the_repository() -> None:
    picture = (DOCS / "images" / "speed.svg").read_text(encoding="utf-8")
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert picture == chart_of(results, SHOWN.split(","))
    assert {found["method"] for found in results["scores"]} >= set(SHOWN.split(","))
    assert len(picture.encode()) < 30_000 and picture.count("<text") >= 8
    results["scores"][-1]["tokens_per_s"] += 1000
    results["scores"][1]["tokens_per_s"] += 1
    assert picture != chart_of(results, SHOWN.split(","))


@pytest.mark.parametrize("name", ["qwen-pair", "smollm2-ngram"])
def test_a_thumbnail_is_a_chart_of_its_report(name: str) -> None:
    page = (DOCS / "reports" / f"{name}.html").read_text(encoding="utf-8")
    picture = (DOCS / "images" / f"{name}.svg").read_text(encoding="utf-8")
    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert picture.strip() in [chart.replace("currentColor", GREY) for chart in charts]


def test_text_is_readable_on_white_and_on_black() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    grey = luminance(GREY)
    for background in ("#ffffff", "#0d1117"):  # of pages in light and in dark
        dark, light = sorted((grey, luminance(background)))
        assert (light + 0.05) / (dark + 0.05) > 4


def test_what_is_no_bench_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    file.write_text("{}")
    run = CliRunner().invoke(main, [str(file)])
    assert (run.exit_code, "not a file of 'specrt bench --json'" in run.output) == (2, True)
