"""A document's table: made of a bench's JSON, and put where it belongs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from specrt.tools.report.readme_table import main

BENCH = {
    "bundle": "model (float32), draft ngram",
    "settings": {"k": 5, "max_new_tokens": 32, "temperature": 0.0},
    "machine": {"cpu": "A CPU", "threads": 2, "versions": {"specrt": "0.1.0"}, "busy_percent_before": 2.0},
    "busy_percent_during": 3.0,
    "prompts": [{"category": "chat"}, {"category": "chat"}],
    "created_utc": "2026-11-30T04:00:00+00:00",
    "scores": [
        {
            "method": name,
            "tokens_per_s": speed,
            "decode_tokens_per_s": None,
            "ratio_to": {"plain": speed / 40},
            "interval_of": {"plain": (0.9, 1.6)},
            "draft_acceptance_rate": rate,
            "ratio_by_category": {"plain": {"chat": speed / 40}},
            "equal_prompts": 2,
            "num_prompts": 2,
        }
        for name, speed, rate in (("plain", 40.0, None), ("ngram", 60.0, 0.25))
    ],
}


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    file = tmp_path / "b.json"
    file.write_text(json.dumps(BENCH))
    return file


def test_the_table(stored: Path) -> None:
    lines = CliRunner().invoke(main, [str(stored)]).output.splitlines()
    assert lines[0].endswith(
        "2 prompts of 1 kinds, at most 32 tokens, greedy; A CPU, 2 threads; specrt 0.1.0; 2026-11-30:"
    )
    assert "| plain | 40.0 |  |  | 1.00 |  | 2 of 2 |" in lines
    assert "| ngram | 60.0 |  |  | 1.50 (0.90 to 1.60) | 25% | 2 of 2 |" in lines
    assert lines[-1] == "ngram, times plain: chat 1.50."


def test_a_table_of_a_busy_machine_has_a_warning(stored: Path) -> None:
    assert "UNRELIABLE" not in CliRunner().invoke(main, [str(stored)]).output
    stored.write_text(json.dumps({**BENCH, "busy_percent_during": 60.0}))
    first = CliRunner().invoke(main, [str(stored)]).output.splitlines()[0]
    assert first.endswith("2026-11-30; UNRELIABLE: other programs kept the CPU 60 % busy:")


def test_the_table_is_put_into_a_document(stored: Path, tmp_path: Path) -> None:
    document = tmp_path / "R.md"
    document.write_text("a\n<!-- bench -->\nold\n<!-- /bench -->\nz\n")
    for _ in range(2):
        assert CliRunner().invoke(main, [str(stored), "--write", str(document)]).exit_code == 0
    text = document.read_text()
    assert text.startswith("a\n<!-- bench -->\nmodel (float32)") and text.endswith("<!-- /bench -->\nz\n")
    assert "old" not in text and text.count("| ngram |") == 1


def test_two_tables_have_marks_of_their_own(stored: Path, tmp_path: Path) -> None:
    document = tmp_path / "R.md"
    document.write_text("<!-- bench -->\nold\n<!-- /bench -->\n<!-- bench of a pair -->\n<!-- /bench of a pair -->\n")
    assert CliRunner().invoke(main, [str(stored), "--write", str(document), "--mark", "bench of a pair"]).exit_code == 0
    text = document.read_text()
    assert "old" in text and text.count("| ngram |") == 1


def test_the_mean_of_the_kinds_is_shown_where_the_bench_has_it(stored: Path) -> None:
    bench = json.loads(stored.read_text())
    bench["scores"][1] |= {
        "mean_of_categories": {"plain": [1.5, [1.2, 1.8]]},
        "decode_mean_of_categories": {"plain": [2.0, None]},
    }
    stored.write_text(json.dumps(bench))
    lines = CliRunner().invoke(main, [str(stored)]).output.splitlines()
    assert lines[-1] == (
        "ngram, times plain: 1.50 (1.20 to 1.80) as the mean of the kinds, 2.00 in decode; by kind chat 1.50."
    )


def test_what_is_no_bench_or_no_place_is_refused(stored: Path, tmp_path: Path) -> None:
    document = tmp_path / "R.md"
    document.write_text("nothing\n")
    run = CliRunner().invoke(main, [str(stored), "--write", str(document)])
    assert (run.exit_code, "are missing" in run.output) == (2, True)
    stored.write_text("{}")
    run = CliRunner().invoke(main, [str(stored)])
    assert (run.exit_code, "not a file of 'specrt bench --json'" in run.output) == (2, True)
