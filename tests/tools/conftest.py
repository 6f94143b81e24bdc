"""Benches that several test files look at."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from specrt.engines.manifest import manifest_from_bundle
from specrt.tools.bench.bench import run_bench
from specrt.tools.bench.methods import (
    choose_methods,
)
from specrt.tools.bench.records import Bench, Settings
from specrt.tools.cli import main
from specrt.tools.prompting.prompts import Prompt
from tests.exports import Exports, made_once
from tests.tools.bench.benches import MACHINE, PROMPTS


@pytest.fixture(scope="session")
def benched(tiny_bundle: Path) -> Bench:
    """Without torch."""
    methods = choose_methods("plain,ngram,model", manifest_from_bundle(tiny_bundle))
    settings = Settings(4, 1, max_new_tokens=24, repeats=1, ignore_eos=True, temperature=0.8, budget_s=60)
    return run_bench(tiny_bundle, methods, [*PROMPTS, Prompt("huge", "dog " * 900)], settings, MACHINE)


@pytest.fixture(scope="session")
def bench_file(exports: Exports, tiny_bundle: Path) -> Path:
    """The file of ``specrt bench`` on three prompts, without torch; read-only."""

    def run(stored: Path) -> None:
        prompts = stored.with_suffix(".txt")
        prompts.write_text("the dog and the dog\ndef area(radius):\nthe cat and the dog\n")
        options = ["--baseline", "plain", "--prompts", str(prompts), "--threads", "1", "--max-new-tokens", "12"]
        options += ["--num-runs", "1", "--json", str(stored)]
        done = CliRunner().invoke(main, ["bench", str(tiny_bundle), *options], standalone_mode=False)
        assert done.exit_code == 0, done.output

    return made_once(exports.folder / "bench.json", run)
