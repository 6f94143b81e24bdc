"""The order of rounds, first come, first served, with a fair share, and the end of generations."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from specrt.runtime.runtime import Runtime, load
from specrt.runtime.stream import Step
from specrt.serving.scheduler import (
    DeadlinePassed,
    Draining,
    Generation,
    OneByOne,
    Outcome,
    QueueFull,
    Row,
    Scheduler,
)
from tests.tools.serving.parrot import held
from tests.tools.serving.serving import wait_until


@pytest.fixture(scope="module")
def runtime(parrot_bundle: Path) -> Iterator[Runtime]:
    with load(parrot_bundle) as opened:
        yield opened


class Log:
    """What the generations report, in order."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.entries: list[tuple[str, Outcome]] = []
        self.texts: dict[str, str] = {}

    def generation(self, name: str, num_tokens: int = 6, deadline: float = float("inf")) -> Generation:
        self.texts[name] = ""
        text = name * num_tokens
        stream = self.runtime.stream([{"role": "user", "content": text}], num_speculative_tokens=0)

        def report(outcome: Outcome) -> None:
            self.entries.append((name, outcome))
            if isinstance(outcome, Step):
                self.texts[name] += outcome.text

        return Generation(stream, report, deadline)

    @property
    def order(self) -> str:
        return "".join(name for name, outcome in self.entries if isinstance(outcome, Step))

    @property
    def ended(self) -> str:
        return "".join(name for name, outcome in self.entries if outcome is None)


@pytest.fixture
def log(runtime: Runtime) -> Log:
    return Log(runtime)


@pytest.fixture
def scheduler(runtime: Runtime) -> Iterator[Scheduler]:
    made = Scheduler(max_concurrency=2, queue_size=2)
    yield made
    made.close()
    assert made.num_running == made.num_waiting == 0


def test_rounds_take_turns_and_places_are_given_in_the_order_of_arrival(scheduler: Scheduler, log: Log) -> None:
    with held():
        for name in "abc":
            scheduler.submit([log.generation(name)])
    wait_until(lambda: len(log.ended) == 3)
    assert log.ended == "abc"
    assert log.texts == {name: name * 6 for name in "abc"}
    first = log.order[1 : log.order.index("c")]  # the first round of a may have begun before b is there
    assert abs(first.count("a") - first.count("b")) <= 1
    assert "aa" not in first and "bb" not in first.replace("bab", "")  # they alternate


def test_a_runner_of_several_rows_gets_as_many_as_it_takes(parrot_bundle: Path) -> None:
    """The interface for rounds of several sequences at once: all rows have their turn, and texts stay the same."""
    sets: list[int] = []

    class Several(OneByOne):
        max_rows = 2

        def run(self, rows: Sequence[Row]) -> Iterator[tuple[Row, Outcome]]:
            sets.append(len({id(row) for row in rows}))
            return super().run(rows)

    with load(parrot_bundle) as runtime:
        log, scheduler = Log(runtime), Scheduler(max_concurrency=3, queue_size=3, runner=Several())
        with held():
            for name in "abc":
                scheduler.submit([log.generation(name, 30)])
        wait_until(lambda: len(log.ended) == 3)
        scheduler.close()
    assert log.texts == {name: name * 30 for name in "abc"}
    assert max(sets) == 2 and sets.count(2) > 30
    counts = [log.order[: len(log.order) // 2].count(name) for name in "abc"]
    assert max(counts) - min(counts) <= 2


def test_a_request_of_many_texts_does_not_hold_up_another(scheduler: Scheduler, log: Log) -> None:
    with held():
        scheduler.submit([log.generation(name) for name in "abcd"])
        scheduler.submit([log.generation("z")])
    wait_until(lambda: len(log.ended) == 5)
    assert log.ended.index("z") == 2  # after the two that had places already
    assert all(log.texts[name] == name * 6 for name in "abcdz")


def test_a_long_prompt_does_not_hold_up_what_runs(scheduler: Scheduler, log: Log) -> None:
    """Its passes take turns with the rounds of others, and its text is that of a run alone."""
    with held():
        scheduler.submit([log.generation("a", 40)])
        scheduler.submit([log.generation("b", 300)])
    wait_until(lambda: len(log.ended) == 2)
    prefill = [
        i
        for i, (name, step) in enumerate(log.entries)
        if name == "b" and isinstance(step, Step) and not step.round.emitted
    ]
    assert len(prefill) == 303 // 8
    during = [name for name, _ in log.entries[prefill[0] : prefill[-1]]]
    assert during.count("a") >= len(prefill) - 2
    assert log.texts == {"a": "a" * 40, "b": "b" * 256}


def test_a_full_queue_takes_no_more(scheduler: Scheduler, log: Log) -> None:
    with held():
        for name in "abcd":
            scheduler.submit([log.generation(name)])
        with pytest.raises(QueueFull):
            scheduler.submit([log.generation("e")])
        assert (scheduler.num_running, scheduler.num_waiting) == (2, 2)
    wait_until(lambda: len(log.ended) == 4)
    scheduler.submit([log.generation("e")])
    wait_until(lambda: len(log.ended) == 5)


def test_what_is_cancelled_reports_nothing_and_frees_its_place(
    scheduler: Scheduler, log: Log, runtime: Runtime
) -> None:
    with held():
        running, waiting, other = log.generation("a", 300), log.generation("w"), log.generation("o")
        for generation in (running, log.generation("b"), waiting, other):
            scheduler.submit([generation])
        scheduler.cancel([running, waiting])
        num_entries = len(log.entries)
    wait_until(lambda: log.ended.endswith("o"))
    assert {name for name, _ in log.entries[num_entries:]} == {"b", "o"}
    assert runtime.num_idle_slots == 2


def test_a_deadline_ends_what_runs_and_what_waits(scheduler: Scheduler, log: Log, runtime: Runtime) -> None:
    soon = time.monotonic() + 0.05
    with held():
        for name in "ab":
            scheduler.submit([log.generation(name, 300, deadline=soon)])
        scheduler.submit([log.generation("c", deadline=soon)])
        time.sleep(0.1)
    wait_until(lambda: sum(isinstance(outcome, DeadlinePassed) for _, outcome in log.entries) == 3)
    scheduler.submit([log.generation("d")])
    wait_until(lambda: log.ended == "d")
    assert runtime.num_idle_slots == 2


def test_an_engine_that_fails_ends_one_text_and_no_other(scheduler: Scheduler, log: Log, runtime: Runtime) -> None:
    with held():
        bad = log.generation("a")
        steps = bad.stream.steps

        def failing() -> Iterator[Step]:
            for step in steps:
                yield step
                if step.round.emitted:
                    break
            steps.close()  # type: ignore[attr-defined]
            raise OSError("the engine is gone")

        bad.stream.steps = failing()
        for generation in (bad, log.generation("b")):
            scheduler.submit([generation])
    wait_until(lambda: log.ended == "b")
    assert log.texts == {"a": "a", "b": "b" * 6}
    outcomes = [outcome for name, outcome in log.entries if name == "a"]
    assert isinstance(outcomes.pop(), OSError) and all(isinstance(outcome, Step) for outcome in outcomes)
    assert runtime.num_idle_slots == 2


def test_a_report_that_fails_ends_one_text_and_no_other(scheduler: Scheduler, log: Log, runtime: Runtime) -> None:
    """Else the engine's thread would end, and every request would wait forever."""
    received: list[Outcome] = []

    def report(outcome: Outcome) -> None:
        received.append(outcome)
        if isinstance(outcome, Step):
            raise OSError("nobody listens")

    with held():
        bad = log.generation("a", 300)
        bad.report = report
        for generation in (bad, log.generation("b")):
            scheduler.submit([generation])
    wait_until(lambda: log.ended == "b")
    assert log.texts["b"] == "b" * 6
    assert [type(outcome) for outcome in received] == [Step, OSError]
    wait_until(lambda: runtime.num_idle_slots == 2)
    scheduler.submit([log.generation("c")])
    wait_until(lambda: log.ended == "bc")


def test_a_thread_that_fails_leaves_no_request_waiting(log: Log, runtime: Runtime) -> None:
    class Broken:
        max_rows = 1

        def run(self, rows: Sequence[Row]) -> Iterator[tuple[Row, Outcome]]:
            raise OSError("a bug")

    scheduler = Scheduler(max_concurrency=1, queue_size=2, runner=Broken())
    with scheduler._changed:  # both are there before the thread fails
        for name in "ab":
            scheduler.submit([log.generation(name)])
    wait_until(lambda: not scheduler.is_alive)
    assert [(name, type(outcome)) for name, outcome in sorted(log.entries)] == [("a", OSError), ("b", OSError)]
    assert scheduler.num_running == scheduler.num_waiting == 0
    with pytest.raises(Draining):
        scheduler.submit([log.generation("c")])
    scheduler.close()


def test_draining_lets_what_there_is_end(scheduler: Scheduler, log: Log) -> None:
    with held():
        for name in "abc":
            scheduler.submit([log.generation(name)])
        drained: list[bool] = []
        thread = threading.Thread(target=lambda: drained.append(scheduler.drain(20)))
        thread.start()
        wait_until(lambda: _refuses(scheduler, log))
        assert scheduler.drain(0.01) is False
    thread.join()
    assert drained == [True] and log.ended == "abc"


def _refuses(scheduler: Scheduler, log: Log) -> bool:
    try:
        scheduler.submit([log.generation("x")])
    except Draining:
        return True
    except QueueFull:
        pass
    return False


def test_closing_reports_what_it_ends(runtime: Runtime, log: Log) -> None:
    scheduler = Scheduler(1, 5)
    with held():
        for name in "ab":
            scheduler.submit([log.generation(name, 300)])
        thread = threading.Thread(target=scheduler.close)
        thread.start()
        wait_until(lambda: sum(isinstance(outcome, Draining) for _, outcome in log.entries) == 2)
    thread.join()
    assert log.ended == "" and runtime.num_idle_slots == 2
