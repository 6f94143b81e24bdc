"""Methods that report false ids, are slow or fail are named; interruption; the order of the turns."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specrt.engines.errors import SpecrtError, UsageError
from specrt.tools.bench import methods as methods_module
from specrt.tools.bench.bench import run_bench
from specrt.tools.bench.journal import Journal
from specrt.tools.bench.methods import (
    Answer,
    Method,
    Worker,
)
from specrt.tools.bench.records import Bench, Settings
from specrt.tools.bench.tables import remarks
from specrt.tools.bench.work import Work, order_of
from tests.progress import KeptProgress, interrupted_at
from tests.tools.bench.benches import MACHINE, PROMPTS

FAKE = """
import json, sys, time
kind = json.loads(sys.argv[1])["kind"]
if kind == "broken":
    print(json.dumps({"error": "no such model", "exit_code": 3}), flush=True)
    sys.exit()
print(json.dumps({}), flush=True)
asked = 0
for line in sys.stdin:
    request = json.loads(line)
    if "time_passes" in request:
        print(json.dumps({"target_ms": [1.0, 1.1], "draft_ms": 0.1}), flush=True)
        continue
    asked += 1
    if kind == "fainting" and asked > 3:
        sys.exit("out of memory")
    ids = list(range(request["max_new_tokens"]))
    if kind == "short":
        ids = ids[: len(ids) // 2]
    if kind == "liar":
        ids[3] = 99
    seconds = {"slow": 4.0, "short": 0.5}.get(kind, 1.0)
    reply = {"token_ids": ids, "seconds": seconds, "arrivals": [[0.1, 1], [seconds, len(ids) - 1]]}
    rounds = [[2, 0]] * (len(ids) - 1) if kind == "slow" else []
    print(json.dumps({**reply, "rounds": rounds, "phase_ms": {}, "peak_bytes": 1}), flush=True)
"""


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Methods whose processes are a script; returns a function that benches them against an honest ``plain``."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)

    def start(bundle: Path, group: list[Method], threads: int, sources: Any) -> Worker:
        kind = group[0].name
        return Worker(kind, [sys.executable, str(script), json.dumps({"kind": kind})])

    monkeypatch.setattr(methods_module, "_start", start)

    def bench(bundle: Path, *kinds: str, **options: Any) -> Bench:
        honest = Method("plain", "specrt", "bundle")
        methods = [honest, *(Method(kind, "transformers", "fp32", "model") for kind in kinds)]
        settings = Settings(4, 1, options.pop("tokens", 8), options.pop("repeats", 1), **options.pop("settings", {}))
        return run_bench(bundle, methods, PROMPTS, settings, MACHINE, required=["plain"], **options)

    return bench


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], KeptProgress]:
    """Gives a progress that sets the bench's clock ahead by 61 s when the step of a name is about to start."""
    elapsed = Work._elapsed_s

    def at(name: str) -> KeptProgress:
        ahead_s = [0.0]
        monkeypatch.setattr(Work, "_elapsed_s", lambda self: elapsed(self) + ahead_s[0])

        def on_step(step: str) -> None:
            if step == name:
                ahead_s[0] = 61.0

        return KeptProgress(on_step)

    return at


def test_methods_with_other_ids_are_reported(tiny_bundle: Path, fakes: Any) -> None:
    bench = fakes(tiny_bundle, "liar", "short")
    plain, liar, short = bench.scores
    assert (plain.equal_prompts, liar.equal_prompts, short.equal_prompts) == (2, 0, 0)
    assert short.ratio_to["plain"] == 1.0  # half of the tokens in half of the time is no gain
    said = "\n".join(remarks(bench))
    assert "liar differs from plain at a, position 3: expected id 3, got id 99" in said
    assert "short differs from plain at a, position 4: expected id 4, got the end" in said
    assert "short returned 8 tokens where others returned 16" in said


def test_a_method_slower_than_plain_is_reported_to_lose(tiny_bundle: Path, fakes: Any) -> None:
    bench = fakes(tiny_bundle, "slow")
    assert bench.scores[1].ratio_to == {"plain": 0.25}
    said = next(line for line in remarks(bench) if line.startswith("slow "))
    assert said == (
        "slow LOSES to plain decoding: 0.25x (0.25 to 0.25); below 1.00, but not distinguishable from it, in "
        "a 0.25x (one prompt), b 0.25x (one prompt)"
    )


def test_a_method_that_fails_is_missing_and_the_others_go_on(tiny_bundle: Path, fakes: Any) -> None:
    bench = fakes(tiny_bundle, "broken", "fainting")
    assert [row.method for row in bench.scores] == ["plain"]
    assert bench.failed["broken"] == "broken: no such model"
    assert "fainting: its process ended with status 1 (out of memory)" in bench.failed["fainting"]
    assert any(line.startswith("fainting is missing: ") for line in remarks(bench))


def test_a_budget_too_small_is_reported(tiny_bundle: Path, fakes: Any) -> None:
    with pytest.raises(SpecrtError, match="the time was over before all methods answered one prompt"):
        fakes(tiny_bundle, settings={"budget_s": 1e-3})


def test_prompts_cut_by_the_time_limit_are_reported(
    tiny_bundle: Path, fakes: Any, late: Callable[[str], KeptProgress]
) -> None:
    """A clock that leaves time for the first prompt only, then for the first answer to the second run."""
    patient = {"budget_s": 60.0, "keep_tokens": True}
    assert not [line for line in remarks(fakes(tiny_bundle, settings=patient)) if "--budget-minutes" in line]
    first = fakes(tiny_bundle, settings=patient, progress=late("plain: prompt 1 of 2, repeat 1"))
    assert [entry.name for entry in first.prompts] == ["a"]
    assert any("no time was left for 1 of 2 prompts; more --budget-minutes" in line for line in remarks(first))
    second = fakes(tiny_bundle, settings=patient, repeats=2, progress=late("plain: prompt 1 of 2, repeat 2"))
    assert any("no time was left for 1 of 4 answers; more" in line for line in remarks(second))


def test_asked_for_tokens_are_kept_others_are_cut(tiny_bundle: Path, fakes: Any) -> None:
    """Two prompts at a second for 16 warm-up tokens (the fake's own word): 0.8 of 4 s are 25 tokens each."""
    short = fakes(tiny_bundle, tokens=64, settings={"budget_s": 4.0})
    assert 16 <= short.settings.max_new_tokens < 64
    assert any("tokens, 64 did not fit in the time; more --budget-minutes" in line for line in remarks(short))
    kept = fakes(tiny_bundle, tokens=64, settings={"budget_s": 4.0, "keep_tokens": True})
    assert kept.settings.max_new_tokens == 64
    assert not any("did not fit in the time" in line for line in remarks(kept))


def test_an_interrupted_bench_goes_on(tiny_bundle: Path, fakes: Any, tmp_path: Path) -> None:
    file = tmp_path / "b.json.partial"

    with pytest.raises(KeyboardInterrupt):
        fakes(tiny_bundle, journal_file=file, progress=interrupted_at("plain: prompt 2 of 2, repeat 1"))
    assert len(file.read_text().splitlines()) == 3  # what is measured, the tokens that were settled, one answer
    file.write_text(file.read_text() + '["plain", "b"')  # as if it had been cut while it wrote
    with pytest.raises(UsageError, match="a bench was interrupted; continue with --resume"):
        fakes(tiny_bundle, journal_file=file)
    with pytest.raises(UsageError, match="it belongs to a bench with other settings"):
        fakes(tiny_bundle, journal_file=file, resume=True, repeats=2)
    kept = KeptProgress()
    bench = fakes(tiny_bundle, journal_file=file, resume=True, progress=kept)
    assert [step for step in kept.steps if "repeat" in step] == ["plain: prompt 2 of 2, repeat 1"]
    assert bench.scores[0].completion_tokens == 16
    assert not file.exists()


def test_a_journal_keeps_answers(tmp_path: Path) -> None:
    answer = Answer((1, 2), 1.5, ((0.5, 1), (1.5, 1)), ((4, 1),), {"draft": 1.0}, 7)
    journal = Journal(tmp_path / "j", {"a": 1})
    journal.add(("plain", "x", 0), answer)
    assert journal.settled("max_new_tokens", 7) == 7
    again = Journal(tmp_path / "j", {"a": 1}, resume=True)
    assert again.answers == {("plain", "x", 0): answer}
    assert again.settled("max_new_tokens", 9) == 7


def test_the_order_of_the_methods_is_shuffled_for_each_block(tiny_bundle: Path, fakes: Any) -> None:
    kept = KeptProgress()
    fakes(tiny_bundle, "other", repeats=4, progress=kept)
    order = [step.split(":")[0] for step in kept.steps if "repeat" in step]
    blocks = [tuple(order[i : i + 2]) for i in range(0, 16, 2)]
    assert set(blocks) == {("plain", "other"), ("other", "plain")}
    firsts = [order_of([Method(c, "", "") for c in "abc"], 0, index)[0].name for index in range(300)]
    assert all(80 <= firsts.count(name) <= 120 for name in "abc")  # fixed by the seed; 100 each, deviation 8
