"""Rounds as CUDA graphs on the simulated GPU: how many calls a round takes, and that its ids stay what they were."""

from __future__ import annotations

import itertools
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import specrt
from specrt.engines.errors import BackendError
from specrt.engines.gpu import graphs
from specrt.engines.trt.engine import TrtBinding
from specrt.runtime.drafting.adaptive import MODEL, AdaptiveDrafter, _Choice
from specrt.runtime.options import options_of
from specrt.runtime.runtime import Runtime
from specrt.runtime.settings import settings_of
from specrt.tools.rounds import run_rounds
from tests.engines.gpu.simulated_gpu import SimulatedGpu
from tests.engines.numpy_samplers.noisy_pair import BACKENDS, NUM_TOKENS, PROMPT, WAYS, K, generated
from tests.engines.trt.simulated_trt import IExecutionContext

MOST_CALLS = 6
CALLS_WITH_TIME = 4  # two launches, a wait, and the time between the events of a draft
TEXTS = 5  # until every round of the text was seen often enough to be captured, the last ones of a text too


@pytest.fixture(params=["tensorrt-rtx"])
def simulated(
    noisy_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> SimulatedGpu:
    """Both libraries take the same way here; what is asked of one of them is a parameter."""
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
    return SimulatedGpu(Path(shutil.copytree(noisy_bundle, tmp_path / "bundle")), request.param, monkeypatch)


def rounds_of(simulated: SimulatedGpu, runtime: Runtime, way: dict[str, Any], texts: int = TEXTS) -> list[Counter[str]]:
    """The calls in each round of a text on a slot that has generated it before."""
    options = options_of({"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "num_speculative_tokens": K, **way})  # type: ignore[typeddict-item]
    settings, slot = settings_of(options, runtime.manifest), runtime.open_slot("model")
    marks: list[Counter[str]] = []
    for _ in range(texts):
        marks.clear()
        prompt = runtime.codec.encode(PROMPT)
        run_rounds(runtime, slot, prompt, settings, lambda *_: marks.append(simulated.cuda.counts.copy()))
    slot.close()
    return [after - before for before, after in itertools.pairwise(marks[1:])]


def calls(seen: Counter[str]) -> int:
    """Calls of the driver and of TensorRT."""
    return sum(count for name, count in seen.items() if not name.endswith(" bytes"))


@pytest.mark.parametrize("name", list(WAYS))
def test_a_round_is_two_launches_and_a_wait(simulated: SimulatedGpu, name: str) -> None:
    with simulated.open() as runtime:
        rounds = rounds_of(simulated, runtime, WAYS[name])
    assert len(rounds) >= 4
    for seen in rounds:
        assert calls(seen) <= MOST_CALLS
        num_drafts = seen["launch"] - 1
        assert num_drafts == (0 if name in ("plain", "ngram") else 1) or seen is rounds[-1]
        assert (seen["wait"], calls(seen)) == (1, 2 + num_drafts)


def test_without_graphs_of_rounds_there_are_many_calls(
    simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the count, and the figures of docs/gpu.md. Single passes are still captured."""
    monkeypatch.setattr(TrtBinding, "together", lambda self: nullcontext())
    with simulated.open() as runtime:
        found = {name: rounds_of(simulated, runtime, WAYS[name], 3)[2] for name in ("greedy", "seed, filters", "block")}
    assert {name: calls(seen) for name, seen in found.items()} == {"greedy": 32, "seed, filters": 50, "block": 55}


@pytest.fixture
def changing_k(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each round has another K, chosen by no time that was measured."""
    chosen: list[int] = []

    def choose(self: AdaptiveDrafter, committed: Any, k: int) -> _Choice:
        chosen.append(min(k, 1 + len(chosen) % K))
        return _Choice(MODEL, chosen[-1], 0.0)

    monkeypatch.setattr(AdaptiveDrafter, "_choose", choose)
    return chosen


def calls_of_steps(simulated: SimulatedGpu, runtime: Runtime, **options: Any) -> tuple[list[int], list[Counter[str]]]:
    """The ids of a text in a slot of the pool, and the calls of its rounds after the prefill."""
    stream = runtime.stream(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True, **options)
    marks = [simulated.cuda.counts.copy() for _ in stream.steps]
    return stream.result.token_ids, [after - before for before, after in itertools.pairwise(marks)]


@pytest.mark.parametrize("simulated", BACKENDS, indirect=True)
def test_a_warm_runtime_has_the_graphs_for_every_k(simulated: SimulatedGpu, changing_k: list[int]) -> None:
    """From the second round on (the first one prefills the draft): two launches, a wait, and the draft's time."""
    with simulated.on_cpu() as runtime:
        expected = [calls_of_steps(simulated, runtime, **way)[0] for way in ({}, {"temperature": 1.0, "seed": 1})]
    with simulated.open() as runtime:
        runtime.warm()
        num_captures = simulated.cuda.counts["capture"]
        changing_k.clear()
        found, rounds = calls_of_steps(simulated, runtime)
        assert found == expected[0]
        assert set(changing_k) == set(range(1, K + 1))
        assert max(calls(seen) for seen in rounds[1:]) == CALLS_WITH_TIME <= MOST_CALLS
        assert {seen["wait"] for seen in rounds[1:]} == {1}
        assert simulated.cuda.counts["capture"] == num_captures
        changing_k.clear()
        assert calls_of_steps(simulated, runtime, temperature=1.0, seed=1)[0] == expected[1]


@pytest.mark.parametrize("fails_at", [1, 8, 12])
def test_a_pass_that_fails_leaves_nothing_that_is_reused(
    simulated: SimulatedGpu, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the prompt, of a draft, of a verification: the host has counted the tokens of passes that never ran."""
    with simulated.on_cpu() as runtime:
        expected = generated(runtime, **WAYS["greedy"])[0]
    execute, passes = IExecutionContext.execute_async_v3, itertools.count(1)

    def fail_once(self: IExecutionContext, stream: int) -> bool:
        return next(passes) != fails_at and execute(self, stream)

    monkeypatch.setattr(IExecutionContext, "execute_async_v3", fail_once)
    with simulated.open() as runtime:
        with pytest.raises(BackendError, match="running it"):
            generated(runtime, **WAYS["greedy"])
        assert generated(runtime, **WAYS["greedy"])[0] == expected


def refuse(self: TrtBinding, width: int, rows: int) -> bool:
    return False


def fail(self: TrtBinding, width: int, rows: int) -> bool:
    raise BackendError("device cuda: cudaMemcpyAsync failed (operation not permitted when stream is capturing)")


@pytest.mark.parametrize("answer", [refuse, fail])
def test_rounds_that_cannot_be_captured_run_pass_by_pass(
    simulated: SimulatedGpu, answer: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning for each model of a slot, and the same ids."""
    with simulated.on_cpu() as runtime:
        expected = generated(runtime, **WAYS["block"])
    monkeypatch.setattr(TrtBinding, "enqueue_captured", answer)
    with warnings.catch_warnings(record=True) as noted, specrt.load(simulated.bundle, backend=simulated.backend) as it:
        warnings.simplefilter("always")
        for _ in range(3):
            assert generated(it, **WAYS["block"])[:2] == expected[:2]
    lines = [str(line.message) for line in noted if "as one CUDA graph" in str(line.message)]
    assert lines == ["a round cannot be captured as one CUDA graph; its passes run one by one"] * 2


def test_passes_that_allocate_are_in_no_graph(simulated: SimulatedGpu) -> None:
    """TensorRT-RTX answers that they cannot be captured."""
    with simulated.on_cpu() as runtime:
        expected = generated(runtime, **WAYS["seed"])
    simulated.library.is_capturable = False
    with (
        pytest.warns(UserWarning, match="it allocates memory in its passes"),
        specrt.load(simulated.bundle, backend=simulated.backend) as runtime,
    ):
        assert generated(runtime, **WAYS["seed"]) == expected
    assert simulated.cuda.counts["launch"] == simulated.cuda.counts["capture"] == 0


@pytest.mark.parametrize("limit", ["MOST_GRAPHS", "MOST_SEEN", "GRAPH_BYTES", "ANSWER_BYTES"])
def test_limits_change_no_id(simulated: SimulatedGpu, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are dropped and captured again, or there are none because the work does not fit."""
    with simulated.on_cpu() as runtime:
        expected = [generated(runtime, **WAYS["block"])[:2] for _ in range(3)]
    monkeypatch.setattr(graphs, limit, 1)
    with simulated.open() as runtime:
        assert [generated(runtime, **WAYS["block"])[:2] for _ in range(3)] == expected
        alive = [graph for graph in simulated.cuda.graphs if len(graph.work) > 1 and not graph.is_dropped]
        assert len(alive) == 2 if limit == "MOST_GRAPHS" else len(alive) < 10


def test_ways_take_turns_in_one_slot(simulated: SimulatedGpu) -> None:
    """Graphs of one way are not used by another one with other samplers, and read what the next text writes."""
    ways = {name: WAYS[name] for name in ("greedy", "seed", "block", "seed, filters", "ngram")}
    ways["seed, hot"] = {**WAYS["seed"], "temperature": 1.7, "seed": 9}
    with simulated.on_cpu() as runtime:
        expected = {name: generated(runtime, **way)[:2] for name, way in ways.items()}
    assert expected["seed"] != expected["seed, hot"]
    with simulated.open() as runtime:
        for _ in range(3):
            assert {name: generated(runtime, **way)[:2] for name, way in ways.items()} == expected
