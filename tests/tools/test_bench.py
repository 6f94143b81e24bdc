"""Benches: contenders in processes that work, lie, are slow or fail; budget, resuming, the report."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from specrt.engines.errors import SpecrtError, UsageError
from specrt.engines.manifest import manifest_from_bundle
from specrt.tools import contenders as contenders_module
from specrt.tools.bench import run_bench
from specrt.tools.bench_run import lineup_of
from specrt.tools.bench_tables import print_bench, remarks
from specrt.tools.bench_types import Bench, Settings
from specrt.tools.bench_work import order_of, tokens_within
from specrt.tools.cli import main
from specrt.tools.contenders import (
    Answer,
    Contender,
    Lineup,
    Worker,
    choose_contenders,
    needed_bytes,
    own_or_shared,
    processes,
)
from specrt.tools.journal import Journal
from specrt.tools.machine import Machine, notes
from specrt.tools.prompts import Prompt
from specrt.tools.report import write_report
from specrt.tools.sample import origins

MACHINE = Machine("a CPU", 2, 1, 0.0, None, {})
ECHO = """
import json, sys
print(json.dumps({"attention": "none"}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    reply = {"token_ids": request["prompt_ids"], "seconds": 1.0}
    if not request["prompt_ids"]:
        reply = {"error": "no tokens", "exit_code": 2}
    if request["prompt_ids"] == [99]:
        sys.exit("it is all too much")
    print(json.dumps(reply), flush=True)
"""


@pytest.fixture
def echo(tmp_path: Path) -> list[str]:
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    return [sys.executable, str(script)]


def test_a_worker_answers_and_ends_with_its_owner(echo: list[str]) -> None:
    with Worker("echo", echo) as worker:
        assert worker.started == {"attention": "none"}
        assert worker.ask(prompt_ids=[3, 4]) == {"token_ids": [3, 4], "seconds": 1.0}
        (process,) = [p for p in psutil.Process().children() if p.cmdline() == echo]
    assert not process.is_running()


def test_a_failed_request_is_one_line_with_its_code_and_the_worker_goes_on(echo: list[str]) -> None:
    with Worker("echo", echo) as worker:
        with pytest.raises(SpecrtError, match=r"^echo: no tokens$") as caught:
            worker.ask(prompt_ids=[])
        assert caught.value.exit_code == 2
        assert worker.ask(prompt_ids=[1])["token_ids"] == [1]


def test_a_worker_that_dies_is_reported_with_its_last_words(echo: list[str]) -> None:
    with (
        Worker("echo", echo) as worker,
        pytest.raises(SpecrtError, match=r"^echo: its process ended with status 1 \(it is all too much\)$"),
    ):
        worker.ask(prompt_ids=[99])


def real_worker(library: str, bundle: Path) -> list[str]:
    settings = {"library": library, "dtype": "fp32", "bundle": str(bundle), "threads": 1, "with_draft": False}
    return [sys.executable, "-m", "specrt.tools.worker", json.dumps(settings)]


@pytest.mark.parametrize("library", ["specrt", "transformers"])
def test_a_worker_that_cannot_load_says_so_in_one_line(library: str, tmp_path: Path) -> None:
    with pytest.raises(SpecrtError, match=r"^it: .*no such bundle folder") as caught:
        Worker("it", real_worker(library, tmp_path / "none"))
    assert caught.value.exit_code == 6
    assert "\n" not in str(caught.value)


def test_a_worker_ends_when_its_input_does(tiny_bundle: Path) -> None:
    """As when the parent dies: nobody is there to kill it."""
    worker = Worker("it", real_worker("specrt", tiny_bundle))
    process = worker._process
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=10) == 0
    process.stdin = None
    worker.close()


def test_a_waiting_worker_uses_no_cpu(tiny_bundle: Path) -> None:
    with Worker("it", real_worker("specrt", tiny_bundle)) as worker:
        worker.ask(prompt_ids=[3, 4, 5], max_new_tokens=20, draft="ngram", k=4, ignore_eos=True)
        time.sleep(0.2)
        process = psutil.Process(worker._process.pid)
        before = sum(process.cpu_times()[:2])
        time.sleep(0.5)
        assert sum(process.cpu_times()[:2]) - before < 0.1


PROMPTS = [Prompt("a", "the dog and the dog and the"), Prompt("b", "def area(radius):")]


@pytest.mark.parametrize(
    ("names", "one_at_a_time"), [("eager,plain,model", False), ("eager,assisted,lookup,plain,ngram,model", True)]
)
def test_every_contender_gives_the_ids_of_transformers(tiny_bundle: Path, names: str, one_at_a_time: bool) -> None:
    contenders = choose_contenders(names, manifest_from_bundle(tiny_bundle))
    settings = Settings(4, 1, max_new_tokens=24, repeats=2, ignore_eos=True, one_at_a_time=one_at_a_time)
    steps: list[str] = []
    bench = run_bench(tiny_bundle, contenders, PROMPTS, settings, MACHINE, steps.append)
    assert [(row.contender, row.equal_prompts) for row in bench.scores] == [(c.name, 2) for c in contenders]
    assert {row.completion_tokens for row in bench.scores} == {48}
    assert sum(step.startswith("loading") for step in steps) == 1 + one_at_a_time
    assert len(bench.processes) == (2 if one_at_a_time else 3)
    model = bench.scores[-1]
    assert model.acceptance_by_position == (1.0,) * 4  # the draft is the target itself
    assert min(row.peak_bytes for row in bench.scores) > 20 << 20
    assert all(0 < row.first_token_ms < row.seconds * 1e3 for row in bench.scores)
    stored = json.loads(json.dumps(bench.as_dict()))
    assert stored["scores"][0]["contender"] == "eager"


@pytest.fixture(scope="module")
def benched(tiny_bundle: Path) -> Bench:
    """Without torch."""
    contenders = choose_contenders("plain,ngram,model", manifest_from_bundle(tiny_bundle))
    settings = Settings(4, 1, max_new_tokens=24, repeats=1, ignore_eos=True, temperature=0.8, budget_s=60)
    return run_bench(tiny_bundle, contenders, [*PROMPTS, Prompt("huge", "dog " * 900)], settings, MACHINE)


def test_sampled_text_is_the_same_with_and_without_drafts(benched: Bench) -> None:
    assert [row.equal_prompts for row in benched.scores] == [2, 2, 2]


def test_what_does_not_fit_is_left_out_and_said(benched: Bench) -> None:
    assert [entry.name for entry in benched.prompts] == ["a", "b"]
    assert any("prompt huge: its" in line for line in remarks(benched))


def test_passes_are_timed(benched: Bench) -> None:
    passes = benched.passes
    assert passes is not None
    assert (len(passes.target_ms), set(passes.break_even_by_k)) == (5, {1, 2, 3, 4})
    assert passes.draft_ms > 0


class _Page(HTMLParser):
    """Whether tags close, and what the page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta",):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
                self.fetched.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in ("meta",):
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_is_one_whole_page_that_fetches_nothing(benched: Bench, tmp_path: Path) -> None:
    written = write_report(benched, tmp_path / "r.html")
    text = written[0].read_text(encoding="utf-8")
    page = _Page()
    page.feed(text)
    assert (page.open, page.fetched) == ([], [])
    assert len(page.ids) == len(set(page.ids))
    assert [path.name for path in written[1:]] == [
        f"r-{name}.png" for name in ("speeds", "categories", "positions", "rounds", "widths", "ks")
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written[1:])
    assert "prefers-color-scheme: dark" in text and "@import" not in text and "url(http" not in text
    assert benched.sample is not None
    shown = "".join(part for part, _ in benched.sample.pieces)
    marked = text[text.index("<pre>") : text.index("</pre>")]
    assert len(re.sub(r"<[^>]+>|&[#\w]+;|\s", "", marked)) <= len(shown)
    assert 'class="accepted"' in marked


def test_a_bench_is_printed(benched: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    print_bench(benched)
    assert "break-even" in capsys.readouterr().out


def test_origins_of_tokens() -> None:
    answer = Answer((1, 2, 3, 4, 5, 6), 1.0, (), ((2, 2), (2, 0), (0, 0), (2, 1)))
    assert origins(answer) == ["plain", "accepted", "accepted", "plain", "corrected", "plain"]


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
    """Contenders whose processes are a script; gives a way to bench them against an honest ``plain``."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)

    def start(bundle: Path, group: list[Contender], threads: int, sources: Any) -> Worker:
        kind = group[0].name
        return Worker(kind, [sys.executable, str(script), json.dumps({"kind": kind})])

    monkeypatch.setattr(contenders_module, "_start", start)
    monkeypatch.setattr("specrt.tools.bench_work.read_bandwidth", lambda threads: 1e9)

    def bench(bundle: Path, *kinds: str, **options: Any) -> Bench:
        honest = Contender("plain", "specrt", "bundle")
        lineup = [honest, *(Contender(kind, "transformers", "fp32", "model") for kind in kinds)]
        settings = Settings(4, 1, 8, options.pop("repeats", 1), **options.pop("settings", {}))
        return run_bench(bundle, lineup, PROMPTS, settings, MACHINE, required=["plain"], **options)

    return bench


def test_contenders_that_lie_are_reported_as_liars(tiny_bundle: Path, fakes: Any) -> None:
    bench = fakes(tiny_bundle, "liar", "short")
    plain, liar, short = bench.scores
    assert (plain.equal_prompts, liar.equal_prompts, short.equal_prompts) == (2, 0, 0)
    assert short.ratio_to["plain"] == 1.0  # half of the tokens in half of the time is no gain
    said = "\n".join(remarks(bench))
    assert "liar does not say what plain says: a, position 3: expected id 3, got id 99" in said
    assert "short does not say what plain says: a, position 4: expected id 4, got the end" in said
    assert "short returned 8 tokens where others returned 16" in said


def test_a_contender_slower_than_plain_is_said_to_lose(tiny_bundle: Path, fakes: Any) -> None:
    bench = fakes(tiny_bundle, "slow")
    assert bench.scores[1].ratio_to == {"plain": 0.25}
    assert "slow LOSES to plain decoding: 0.25x; it loses in a 0.25, b 0.25" in remarks(bench)


def test_a_contender_that_fails_is_missing_and_the_others_go_on(tiny_bundle: Path, fakes: Any) -> None:
    bench = fakes(tiny_bundle, "broken", "fainting")
    assert [row.contender for row in bench.scores] == ["plain"]
    assert bench.failed["broken"] == "broken: no such model"
    assert "fainting: its process ended with status 1 (out of memory)" in bench.failed["fainting"]
    assert any(line.startswith("fainting is missing: ") for line in remarks(bench))


def test_a_budget_too_small_is_said(tiny_bundle: Path, fakes: Any) -> None:
    with pytest.raises(SpecrtError, match="the time was over before one prompt"):
        fakes(tiny_bundle, settings={"budget_s": 1e-3})


def test_an_interrupted_bench_goes_on(tiny_bundle: Path, fakes: Any, tmp_path: Path) -> None:
    file = tmp_path / "b.json.partial"

    def stop(step: str) -> None:
        if step == "plain: prompt 2 of 2, repeat 1":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fakes(tiny_bundle, journal_file=file, advance=stop)
    assert len(file.read_text().splitlines()) == 3  # what is measured, the tokens that were settled, one answer
    file.write_text(file.read_text() + '["plain", "b"')  # as if it had been cut while it wrote
    with pytest.raises(UsageError, match="a bench was interrupted; go on with --resume"):
        fakes(tiny_bundle, journal_file=file)
    with pytest.raises(UsageError, match="it belongs to a bench with other settings"):
        fakes(tiny_bundle, journal_file=file, resume=True, repeats=2)
    steps: list[str] = []
    bench = fakes(tiny_bundle, journal_file=file, resume=True, advance=steps.append)
    assert [step for step in steps if "repeat" in step] == ["plain: prompt 2 of 2, repeat 1"]
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


def test_the_order_of_the_contenders_is_drawn_for_each_block(tiny_bundle: Path, fakes: Any) -> None:
    steps: list[str] = []
    fakes(tiny_bundle, "other", repeats=4, advance=steps.append)
    order = [step.split(":")[0] for step in steps if "repeat" in step]
    blocks = [tuple(order[i : i + 2]) for i in range(0, 16, 2)]
    assert set(blocks) == {("plain", "other"), ("other", "plain")}
    firsts = [order_of([Contender(c, "", "") for c in "abc"], 0, index)[0].name for index in range(300)]
    assert all(80 <= firsts.count(name) <= 120 for name in "abc")  # fixed by the seed; 100 each, deviation 8


def test_tokens_follow_from_the_time() -> None:
    assert tokens_within(64, None, [1.0], 12) == 64
    assert tokens_within(64, 600, [0.02, 0.05], 12) == 64
    assert tokens_within(64, 61, [0.05, 0.05], 12) == 40
    assert tokens_within(64, 1, [0.05], 12) == 16
    assert tokens_within(8, 1, [0.05], 12) == 8


def test_k_beyond_the_bundle_is_refused_before_anything_is_loaded(tiny_bundle: Path) -> None:
    steps: list[str] = []
    contenders = choose_contenders("plain", manifest_from_bundle(tiny_bundle))
    with pytest.raises(UsageError, match="k: got 5, this bundle was exported for 1 to 4"):
        run_bench(tiny_bundle, contenders, [Prompt("a", "a")], Settings(5, 1), MACHINE, steps.append)
    assert steps == []


def test_processes_are_shared_where_memory_is_short(tiny_bundle: Path) -> None:
    manifest = manifest_from_bundle(tiny_bundle)
    contenders = choose_contenders("eager,assisted,plain", manifest)
    assert own_or_shared(manifest, contenders, 1 << 40) == [[c] for c in contenders]
    assert own_or_shared(manifest, contenders, 1 << 20) == processes(contenders)


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
        (["--budget-minutes", "0"], "expected more than 0"),
    ],
)
def test_bad_options_are_refused(tiny_bundle: Path, options: list[str], message: str) -> None:
    run = CliRunner().invoke(main, ["bench", str(tiny_bundle), *options])
    assert (run.exit_code, message in run.output) == (2, True), run.output


def test_contenders_of_the_same_weights_share_a_process(tiny_bundle: Path) -> None:
    manifest = manifest_from_bundle(tiny_bundle)
    groups = processes(choose_contenders("eager,plain,eager-bf16,assisted,model", manifest))
    assert [[c.name for c in group] for group in groups] == [["eager", "assisted"], ["plain", "model"], ["eager-bf16"]]
    fp32, _, bf16 = (needed_bytes(manifest, group) for group in groups)
    assert fp32 - bf16 == manifest.target.weights_bytes // 2


def test_unknown_contenders_are_refused(tiny_bundle: Path) -> None:
    with pytest.raises(UsageError, match=r"^contenders: got 'fast', expected some of eager"):
        choose_contenders("eager,fast", manifest_from_bundle(tiny_bundle))


def test_a_lineup_that_cannot_load_leaves_no_process(tiny_bundle: Path, tmp_path: Path) -> None:
    contenders = choose_contenders("plain", manifest_from_bundle(tiny_bundle))
    before = len(psutil.Process().children())
    with pytest.raises(SpecrtError, match="specrt bundle"):
        Lineup(tmp_path / "none", [contenders], 1)
    assert len(psutil.Process().children()) == before


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
