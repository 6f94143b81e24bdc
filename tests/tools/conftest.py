"""A bench that several test files look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrt.engines.manifest import manifest_from_bundle
from specrt.tools.bench.bench import run_bench
from specrt.tools.bench.methods import (
    choose_methods,
)
from specrt.tools.bench.records import Bench, Settings
from specrt.tools.prompting.prompts import Prompt
from tests.tools.bench.benches import MACHINE, PROMPTS


@pytest.fixture(scope="session")
def benched(tiny_bundle: Path) -> Bench:
    """Without torch."""
    methods = choose_methods("plain,ngram,model", manifest_from_bundle(tiny_bundle))
    settings = Settings(4, 1, max_new_tokens=24, repeats=1, ignore_eos=True, temperature=0.8, budget_s=60)
    return run_bench(tiny_bundle, methods, [*PROMPTS, Prompt("huge", "dog " * 900)], settings, MACHINE)
