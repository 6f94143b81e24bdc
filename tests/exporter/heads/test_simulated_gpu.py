"""A head on the simulated GPU: the ids of the CPU, and features that never pass through the host."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from specrt.engines.buffers import allocated_bytes, plan_slot
from specrt.engines.contract import FEATURE_CACHE, FEATURES, HIDDEN
from specrt.engines.errors import ResourceError
from specrt.engines.gpu.device import DeviceArray
from specrt.engines.manifest import manifest_from_bundle
from specrt.engines.trt.build import build
from specrt.engines.trt.engine import TrtBinding
from specrt.engines.trt.library import load_library
from specrt.engines.trt.network import make_logger, parse
from specrt.engines.trt.record import record_from_bundle
from specrt.runtime.drafting.adaptive import MODEL, AdaptiveDrafter, _Choice
from specrt.runtime.drafting.drafters import DeferredDrafter
from specrt.runtime.options import options_of
from specrt.runtime.runtime import Runtime
from specrt.runtime.settings import Settings, settings_of
from specrt.runtime.slots import Slot
from specrt.tools.compare import compare as module
from specrt.tools.compare import graphs
from specrt.tools.compare.compare import compare
from specrt.tools.rounds import run_rounds
from tests.engines.gpu.simulated_gpu import SimulatedGpu
from tests.engines.numpy_samplers.noisy_pair import SEEN, WAYS, K, generated
from tests.engines.trt.simulated_trt import SCRATCH_BYTES
from tests.exporter.heads.pairs import DIALECTS, PROMPTS, head_bundle
from tests.exports import Exports


@pytest.fixture
def bundle(exports: Exports, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the dialect of ``request``, ``standard`` without one."""
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
    dialect = getattr(request, "param", "standard")
    made = head_bundle(exports, **DIALECTS[dialect], max_seq_len=128, num_speculative_tokens=K)
    return Path(shutil.copytree(made, tmp_path / "bundle"))


@pytest.fixture
def simulated(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    return SimulatedGpu(bundle, manifest_from_bundle(bundle).backends[0], monkeypatch)


BOTH = ("standard", "standard-22")
both_dialects = pytest.mark.parametrize("bundle", BOTH, indirect=True)


@both_dialects
def test_every_way_gives_the_ids_of_the_cpu(simulated: SimulatedGpu) -> None:
    """Deferred ids too; each way finds the slot as the one before left it."""
    ways = {**WAYS, **{name: way for name, way in SEEN.items() if name != "processors"}}
    with simulated.on_cpu() as runtime:
        expected = {name: generated(runtime, PROMPTS[1], **way) for name, way in ways.items()}
    with simulated.open() as runtime:
        assert {name: generated(runtime, PROMPTS[1], **way) for name, way in ways.items()} == expected
    assert sum(expected["greedy"][1][1:]) > 0, "some drafts are accepted"


@both_dialects
def test_features_are_written_where_the_head_reads_them(
    simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round copies no features. Those of a round that the head has not read are copied once, on the device."""
    copies: list[tuple[str, int, int, int]] = []
    for kind in ("upload", "download", "copy"):
        original = getattr(simulated.cuda, kind)

        def noted(target: int, source: int, size: int, kind: str = kind, original: Any = original) -> Any:
            copies.append((kind, target, source, size))
            return original(target, source, size)

        monkeypatch.setattr(simulated.cuda, kind, noted)
    with simulated.open() as runtime:
        slot = runtime.open_slot("model")
        assert slot.draft is not None
        written, cache, hidden = (
            memory_of(part.model.binding, name)
            for part, name in ((slot.target, FEATURES), (slot.draft, FEATURE_CACHE), (slot.draft, HIDDEN))
        )
        assert written.address == cache.address and written.num_bytes == cache.num_bytes
        target, drafter = runtime.begin(slot, PROMPTS[0], Settings(30, 3, "model"))
        assert isinstance(drafter, DeferredDrafter)
        _, token = target.verify(PROMPTS[0], ())
        tokens = [*PROMPTS[0], token]
        drafter.prefill(tokens[:-1])
        copies.clear()
        drafted = drafter.propose(tokens, 3)
        accepted, token = target.verify(tokens, drafted)
        tokens += [*drafted[:accepted], token]
        target.rollback(len(tokens))
        drafter.rollback(len(tokens))
        row_bytes, spec = 2 * 64, slot.draft.model.spec
        own = cache.address + (spec.max_width + spec.capacity) * row_bytes

        def of_features() -> list[tuple[str, int, int, int]]:
            places = [(memory.address, memory.address + memory.num_bytes) for memory in (cache, hidden)]
            return [copy for copy in copies if any(a <= at < b for a, b in places for at in copy[1:3])]

        assert of_features() == [("copy", own, hidden.address, row_bytes)] * 2
        copies.clear()
        target.verify(tokens, [5, 18])
        at = cache.address + (spec.max_width + len(PROMPTS[0])) * row_bytes
        assert of_features() == [("copy", at, cache.address, (accepted + 1) * row_bytes)]
        slot.close()


def memory_of(binding: Any, name: str) -> DeviceArray:
    memory = binding.memory[name]
    assert isinstance(memory, DeviceArray)
    return memory


def rounds_of(simulated: SimulatedGpu, slot: Slot, runtime: Runtime, texts: int = 5, **way: Any) -> list[Counter[str]]:
    """The calls in each round of a text, the last of ``texts`` times that the slot generates it."""
    options = options_of({"max_new_tokens": 20, "ignore_eos": True, "num_speculative_tokens": K, **way})  # type: ignore[typeddict-item]
    marks: list[Counter[str]] = []
    for _ in range(texts):
        marks.clear()
        settings = settings_of(options, runtime.manifest)
        run_rounds(runtime, slot, PROMPTS[0], settings, lambda *_: marks.append(simulated.cuda.counts.copy()))
    return [after - before for before, after in itertools.pairwise(marks[1:])]


def num_calls(seen: Counter[str]) -> int:
    return sum(count for name, count in seen.items() if not name.endswith(" bytes"))


CALLS = {"greedy": 3, "seed, filters": 3, "block": 3, "ngram": 3}
PASS_BY_PASS = {"greedy": 38, "seed, filters": 56, "block": 61, "ngram": 7}  # the figures of docs/gpu.md


def test_a_round_of_a_head_is_two_launches_and_a_wait(simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds without the head copy the features that it has not read. Control: many calls without graphs of rounds."""
    with simulated.open() as runtime:
        slot = runtime.open_slot("model")
        for name, expected in CALLS.items():
            rounds = rounds_of(simulated, slot, runtime, **WAYS[name])
            assert {seen["wait"] for seen in rounds} == {1}, name
            assert max(map(num_calls, rounds[:-1])) == expected, name
            copied = {seen["copy"] for seen in rounds[:-1]}
            assert copied == {int(name == "ngram")}, name
        slot.close()
        monkeypatch.setattr(TrtBinding, "together", lambda self: nullcontext())
        assert most_calls(simulated, runtime) == PASS_BY_PASS


@pytest.mark.parametrize("bundle", BOTH[1:], indirect=True)
def test_where_buffers_change_places_each_pass_is_a_launch(simulated: SimulatedGpu) -> None:
    with simulated.open() as runtime:
        assert most_calls(simulated, runtime) == PASS_BY_PASS


def most_calls(simulated: SimulatedGpu, runtime: Runtime) -> dict[str, int]:
    """The most calls in a round that recurs, by way; the last round of a text is a shorter one."""
    slot = runtime.open_slot("model")
    found: dict[str, int] = {}
    for name in CALLS:
        rounds = rounds_of(simulated, slot, runtime, 3, **WAYS[name])[:-1]
        assert {seen["wait"] for seen in rounds} == {1}, name
        found[name] = max(map(num_calls, rounds))
    slot.close()
    return found


def test_a_round_with_a_chosen_k_also_asks_for_the_time(
    simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []

    def choose(self: AdaptiveDrafter, committed: Any, k: int) -> _Choice:
        chosen.append(min(k, 1 + len(committed) % K))
        return _Choice(MODEL, chosen[-1], 0.0)

    monkeypatch.setattr(AdaptiveDrafter, "_choose", choose)
    with simulated.open() as runtime:
        slot = runtime.open_slot("model")
        rounds = rounds_of(simulated, slot, runtime, draft="auto", num_speculative_tokens=None)
        slot.close()
        monkeypatch.setattr(TrtBinding, "together", lambda self: nullcontext())
        slot = runtime.open_slot("model")
        one_by_one = rounds_of(simulated, slot, runtime, 3, draft="auto", num_speculative_tokens=None)
        slot.close()
    assert len(set(chosen)) > 2
    assert {(num_calls(seen), seen["wait"], seen["elapsed"]) for seen in rounds[:-1]} == {(4, 1, 1)}
    assert max(map(num_calls, one_by_one[:-1])) == PASS_BY_PASS["greedy"] + 1, "also the time between two events"


def test_a_head_is_given_back_where_its_target_does_not_fit(
    simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    with simulated.open() as runtime:
        runtime.open_slot("model").close()  # loads
        simulated.device.wait()
        before, allocate = dict(simulated.cuda.sizes), simulated.cuda.allocate
        for most in range(40):
            left = iter(range(most))

            def limited(num_bytes: int, left: Any = left) -> int:
                if next(left, None) is None:
                    raise ResourceError("the GPU is full")
                return allocate(num_bytes)

            monkeypatch.setattr(simulated.cuda, "allocate", limited)
            try:
                slot = runtime.open_slot("model")
            except ResourceError:
                assert simulated.cuda.sizes == before, most
            else:
                slot.close()
                break
        assert most > 8, "it failed at each of them"


@both_dialects
def test_a_slot_with_a_head_takes_what_is_planned(simulated: SimulatedGpu) -> None:
    plan = plan_slot(simulated.manifest, simulated.backend, scratch_bytes=SCRATCH_BYTES)
    with simulated.open() as runtime:
        slot = runtime.open_slot("model")
        assert slot.draft is not None
        for part in (slot.target, slot.draft):
            assert isinstance(part.model.binding, TrtBinding)
            part.samplers.sampler("match")
            part.model.binding._rounds.reserve()
        slot.target.model.feed(PROMPTS[0], 1)
        slot.draft.model.feed(PROMPTS[0][1:], 1)
        allocated = sum(simulated.cuda.sizes.values()) + sum(simulated.cuda.pinned.values())
        slot.close()
    assert allocated == allocated_bytes(plan)


def test_the_head_is_an_engine_of_its_own(simulated: SimulatedGpu) -> None:
    """Built from its graph and the two files that hold its weights."""
    record = record_from_bundle(simulated.bundle, "tensorrt-rtx")
    assert set(record.engines["draft"].sources) == {
        "target/head.onnx",
        "target/head.onnx.data",
        "target/model.onnx.data",
    }
    manifest = manifest_from_bundle(simulated.bundle)
    assert manifest.draft.model is not None and manifest.draft.model.parity.argmax_agreement > 0.95


@pytest.mark.parametrize("bundle", [BOTH[0], pytest.param(BOTH[1], marks=pytest.mark.slow)], indirect=True)
def test_compare_feeds_the_head_its_features(simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "open_device", lambda: simulated.device)
    monkeypatch.setattr(graphs, "SAMPLER_NAMES", ("match",))
    found = compare(simulated.bundle, simulated.backend)
    assert found.failed == [] and {"target/model.onnx", "target/head.onnx"} <= {row.graph for row in found.results}


@pytest.mark.slow
@both_dialects
def test_a_warm_slot_gives_the_same_ids(simulated: SimulatedGpu) -> None:
    with simulated.open() as runtime:
        expected = generated(runtime, PROMPTS[1], **WAYS["greedy"])
    with simulated.open() as runtime:
        runtime.warm()
        num_captures = simulated.cuda.counts["capture"]
        assert generated(runtime, PROMPTS[1], **WAYS["greedy"])[:2] == expected[:2]
        assert simulated.cuda.counts["capture"] == num_captures, "each number of accepted ids has its graph"


@pytest.mark.slow
@both_dialects
def test_tensorrt_builds_the_head(bundle: Path) -> None:
    """With TensorRT's own attention and cache updates, where the dialect has them."""
    record = build(bundle, "tensorrt-rtx")
    head = manifest_from_bundle(bundle).draft.model
    assert head is not None and head.graph in record.engines["draft"].sources
    trt = load_library("tensorrt-rtx")
    logger = make_logger(trt)
    network = parse(trt, trt.Builder(logger), logger, bundle / head.graph)
    kinds = Counter(network.get_layer(index).type.name for index in range(network.num_layers))
    print(dict(kinds))
    expected = (1, 2, 0) if head.spec.dialect == BOTH[0] else (0, 0, 2)
    assert (kinds["ATTENTION_INPUT"], kinds["KV_CACHE_UPDATE"], kinds["SCATTER"]) == expected
