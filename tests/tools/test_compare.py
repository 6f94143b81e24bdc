"""Comparisons: figures from hand-made timings, contenders that lie or are slow, and workers that fail."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from specrt.engines.errors import SpecrtError, UsageError
from specrt.engines.manifest import manifest_from_bundle
from specrt.tools.compare import Settings, compare
from specrt.tools.contenders import Answer, Lineup, Worker, choose_contenders, needed_bytes, processes
from specrt.tools.machine import Machine, notes
from specrt.tools.prompts import Prompt
from specrt.tools.scores import Difference, Score, first_difference, score

MACHINE = Machine("a CPU", 2, 1, 0.0, None, {})
CATEGORIES = ["chat", "math"]
ECHO = """
import json, sys
print(json.dumps({"attention": "none"}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    reply = {"token_ids": request["prompt_ids"], "seconds": 1.0, "first_token_seconds": 0.5, "num_first_tokens": 1,
             "stats": {}}
    if not request["prompt_ids"]:
        reply = {"error": "no tokens", "exit_code": 2}
    if request["prompt_ids"] == [99]:
        sys.exit("it is all too much")
    print(json.dumps(reply), flush=True)
"""


def answer(ids: list[int], seconds: float, first: float = 0.0, **stats: int) -> Answer:
    return Answer(tuple(ids), seconds, first, 1, stats)


def scores(**answers: list[list[Answer]]) -> dict[str, Score]:
    return {row.contender: row for row in score(answers, CATEGORIES)}


def repeated(ids: list[int], *seconds: float) -> list[Answer]:
    return [answer(ids, s) for s in seconds]


EAGER = [repeated([1, 2, 3, 4], 2.0, 9.0, 1.0), repeated([5, 6], 1.0, 1.0, 1.0)]


def test_seconds_are_medians_summed_over_the_prompts() -> None:
    row = scores(eager=EAGER)["eager"]
    assert (row.seconds, row.completion_tokens, row.tokens_per_s) == (3.0, 6, 2.0)
    assert row.tokens_per_s_by_category == {"chat": 2.0, "math": 2.0}
    assert row.ratio_to == {"eager": 1.0}


def test_decoding_leaves_out_the_first_tokens_and_their_time() -> None:
    prompts = [[answer([1, 2, 3], 3.0, 1.0), answer([1, 2, 3], 5.0, 4.0)], [answer([4, 5], 2.0, 1.5)]]
    row = scores(eager=prompts)["eager"]
    assert row.decode_tokens_per_s == pytest.approx((2 + 1) / (1.5 + 0.5))


def test_one_token_has_no_decoding_speed() -> None:
    assert scores(eager=[[answer([1], 1.0, 1.0)], [answer([2], 1.0, 1.0)]])["eager"].decode_tokens_per_s is None


def test_ratios_are_to_eager_and_to_plain() -> None:
    plain = [repeated([1, 2, 3, 4], 1.0), repeated([5, 6], 0.5)]
    model = [repeated([1, 2, 3, 4], 0.25), repeated([5, 6], 0.5)]
    rows = scores(eager=EAGER, plain=plain, model=model)
    assert rows["plain"].ratio_to == {"eager": 2.0, "plain": 1.0}
    assert rows["model"].ratio_to == {"eager": 4.0, "plain": 2.0}
    assert rows["model"].ratio_by_category == {
        "eager": {"chat": 8.0, "math": 2.0},
        "plain": {"chat": 4.0, "math": 1.0},
    }
    assert [row.equal_prompts for row in rows.values()] == [2, 2, 2]


def test_a_slower_contender_is_reported_as_slower() -> None:
    slow = [repeated([1, 2, 3, 4], 4.0), repeated([5, 6], 2.0)]
    row = scores(eager=EAGER, ngram=slow)["ngram"]
    assert row.ratio_to == {"eager": 0.5}
    assert row.differences == ()


def test_other_ids_are_reported_with_their_place() -> None:
    liar = [repeated([1, 2, 7, 4], 1.0), repeated([5, 6], 1.0)]
    row = scores(eager=EAGER, model=liar)["model"]
    assert (row.equal_prompts, row.num_prompts) == (1, 2)
    assert row.differences == (Difference("chat", 2, 3, 7),)
    assert str(row.differences[0]) == "chat, position 2: expected id 3, got id 7"


def test_ending_early_is_reported_and_earns_nothing() -> None:
    """A contender that drops half of its tokens and takes half of the time is no faster."""
    liar = [repeated([1, 2], 1.0), repeated([5], 0.5)]
    row = scores(eager=EAGER, model=liar)["model"]
    assert row.ratio_to == {"eager": 1.0}
    assert row.differences == (Difference("chat", 2, 3, None), Difference("math", 1, 6, None))


def test_a_lie_in_any_repeat_is_found() -> None:
    liar = [[answer([1, 2, 3, 4], 1.0), answer([1, 2, 3, 4, 5], 1.0)], repeated([5, 6], 1.0)]
    row = scores(eager=EAGER, model=liar)["model"]
    assert row.differences == (Difference("chat", 4, None, 5),)


def test_the_first_contender_must_agree_with_itself() -> None:
    wavering = [[answer([1, 2], 1.0), answer([1, 3], 1.0)], repeated([5], 1.0)]
    assert scores(eager=wavering)["eager"].equal_prompts == 1


def test_no_tokens_are_no_speed() -> None:
    row = scores(eager=EAGER, model=[repeated([], 1.0), repeated([], 1.0)])["model"]
    assert (row.tokens_per_s, row.ratio_to) == (0.0, {"eager": 0.0})


def test_acceptance_is_summed_before_it_is_divided() -> None:
    stats = [{"rounds": 2, "drafted": 8, "accepted": 6, "own": 2}, {"rounds": 3, "drafted": 2, "accepted": 0, "own": 3}]
    row = scores(model=[[answer([1], 1.0, **stats[0])], [answer([1], 1.0, **stats[1])]])["model"]
    assert row.draft_acceptance_rate == pytest.approx(6 / 10)
    assert row.mean_acceptance_length == pytest.approx(11 / 5)
    assert scores(eager=EAGER)["eager"].mean_acceptance_length is None


def test_equal_ids_do_not_differ() -> None:
    assert first_difference("x", [], []) is None
    assert first_difference("x", [1, 2], [1, 2]) is None


@pytest.fixture
def echo(tmp_path: Path) -> list[str]:
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    return [sys.executable, str(script)]


def test_a_worker_answers_and_ends_with_its_owner(echo: list[str]) -> None:
    with Worker("echo", echo) as worker:
        assert worker.started == {"attention": "none"}
        assert worker.ask(prompt_ids=[3, 4]) == Answer((3, 4), 1.0, 0.5, 1, {})
        (process,) = [p for p in psutil.Process().children() if p.cmdline() == echo]
    assert not process.is_running()


def test_a_failed_request_is_one_line_with_its_code_and_the_worker_goes_on(echo: list[str]) -> None:
    with Worker("echo", echo) as worker:
        with pytest.raises(SpecrtError, match=r"^echo: no tokens$") as caught:
            worker.ask(prompt_ids=[])
        assert caught.value.exit_code == 2
        assert worker.ask(prompt_ids=[1]).token_ids == (1,)


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


@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_every_contender_gives_the_ids_of_transformers(tiny_bundle: Path, one_at_a_time: bool) -> None:
    contenders = choose_contenders("eager,assisted,lookup,plain,ngram,model", manifest_from_bundle(tiny_bundle))
    prompts = [Prompt("a", "the dog and the dog and the"), Prompt("b", "def area(radius):")]
    settings = Settings(4, 1, max_new_tokens=24, repeats=2, ignore_eos=True, one_at_a_time=one_at_a_time)
    steps: list[str] = []
    comparison = compare(tiny_bundle, contenders, prompts, settings, MACHINE, steps.append)
    assert [(row.contender, row.equal_prompts) for row in comparison.scores] == [(c.name, 2) for c in contenders]
    assert {row.completion_tokens for row in comparison.scores} == {48}
    assert sum(step.startswith("loading") for step in steps) == 1 + one_at_a_time
    model = comparison.scores[-1]
    assert model.draft_acceptance_rate == 1.0  # the draft is the target itself
    assert json.loads(json.dumps(comparison.as_dict()))["scores"][0]["contender"] == "eager"


def test_the_order_of_the_contenders_rotates(tiny_bundle: Path) -> None:
    contenders = choose_contenders("plain,ngram", manifest_from_bundle(tiny_bundle))
    steps: list[str] = []
    prompts = [Prompt("a", "a"), Prompt("b", "b")]
    compare(tiny_bundle, contenders, prompts, Settings(4, 1, 2, repeats=2), MACHINE, steps.append)
    order = [step.split(":")[0] for step in steps if "repeat" in step]
    assert order == ["plain", "ngram", "ngram", "plain", "ngram", "plain", "plain", "ngram"]


def test_k_beyond_the_bundle_is_refused_before_anything_is_loaded(tiny_bundle: Path) -> None:
    steps: list[str] = []
    contenders = choose_contenders("plain", manifest_from_bundle(tiny_bundle))
    with pytest.raises(UsageError, match="k: got 5, this bundle was exported for 1 to 4"):
        compare(tiny_bundle, contenders, [Prompt("a", "a")], Settings(5, 1), MACHINE, steps.append)
    assert steps == []


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
        Lineup(tmp_path / "none", contenders, 1)
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
