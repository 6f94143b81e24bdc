"""The command ``specrt bench``: who competes, what is refused, what is told beforehand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from specrt.engines.errors import UsageError
from specrt.engines.manifest import manifest_from_bundle
from specrt.tools.bench_run import lineup_of
from specrt.tools.bench_types import Settings
from specrt.tools.cli import main
from specrt.tools.machine import Machine, notes
from tests.tools.benches import MACHINE


def test_the_lineup_of_the_command(tiny_bundle: Path) -> None:
    manifest = manifest_from_bundle(tiny_bundle)
    names = [contender.name for contender in lineup_of("eager,assisted", manifest)]
    assert names == ["eager", "assisted", "plain", "auto", "ngram", "model"]


def test_the_command(tiny_bundle: Path, tmp_path: Path) -> None:
    prompts, stored = tmp_path / "p.txt", tmp_path / "b.json"
    prompts.write_text("the dog and the dog\n")
    options = ["--baseline", "plain", "--prompts", str(prompts), "--threads", "1", "--max-new-tokens", "8"]
    run = CliRunner().invoke(main, ["bench", str(tiny_bundle), *options, "--json", str(stored)], standalone_mode=False)
    assert run.exit_code == 0, run.output
    assert [row["equal_prompts"] for row in json.loads(stored.read_text())["scores"]] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resume"], "give the same --json"),
        (["--json", "nowhere/x.json"], "its folder does not exist"),
        (["--baseline", "fast"], "contenders: got 'fast'"),
        (["--categories", "poetry"], "categories: got 'poetry'"),
        (["--categories", "chat", "--prompts", "x.txt"], "leave one out"),
        (["--budget-minutes", "-1"], "expected minutes, or 0 for no limit"),
    ],
)
def test_bad_options_are_refused(tiny_bundle: Path, options: list[str], message: str) -> None:
    run = CliRunner().invoke(main, ["bench", str(tiny_bundle), *options])
    assert (run.exit_code, message in run.output) == (2, True), run.output


@pytest.mark.parametrize("name", ["k", "threads", "max_new_tokens", "repeats"])
def test_settings_are_positive(name: str) -> None:
    with pytest.raises(UsageError, match="got 0, expected 1 or more"):
        replace(Settings(1, 1), **{name: 0})  # type: ignore[arg-type]


def test_a_busy_machine_is_told() -> None:
    assert len(notes(MACHINE, [1, 2], False)) == 1
    busy = Machine("a CPU", 2, 1, 55.0, "PASSIVE", {})
    assert "do not trust these times" in notes(busy, [1], False)[1]
    assert "OMP_WAIT_POLICY PASSIVE" in str(busy)


def test_too_little_memory_names_the_way_out() -> None:
    available = psutil.virtual_memory().available
    assert "--one-at-a-time" in notes(MACHINE, [available, available], False)[0]
    assert "--one-at-a-time" not in notes(MACHINE, [1, 2], False)[0]
