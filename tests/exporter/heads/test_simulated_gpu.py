"""A head on the simulated GPU: the ids of the CPU, and features that never pass through the host."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specrt.engines.buffers import allocated_bytes, plan_slot
from specrt.engines.contract import FEATURE_CACHE, FEATURES, HIDDEN
from specrt.engines.manifest import manifest_from_bundle
from specrt.engines.trt.build import build
from specrt.engines.trt.engine import TrtBinding
from specrt.engines.trt.library import load_library
from specrt.engines.trt.network import make_logger, parse
from specrt.engines.trt.record import record_from_bundle
from specrt.runtime.drafting.drafters import DeferredDrafter
from specrt.runtime.settings import Settings
from specrt.tools.compare import compare as module
from specrt.tools.compare import graphs
from specrt.tools.compare.compare import compare
from tests.engines.gpu.simulated_gpu import SimulatedGpu
from tests.engines.numpy_samplers.noisy_pair import SEEN, WAYS, K, generated
from tests.engines.trt.simulated_trt import SCRATCH_BYTES
from tests.exporter.heads.pairs import PROMPTS, head_bundle
from tests.exports import Exports


@pytest.fixture(scope="session")
def exported(exports: Exports) -> Path:
    return head_bundle(exports, backend="tensorrt-rtx", max_seq_len=128, num_speculative_tokens=K)


@pytest.fixture
def simulated(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
    return SimulatedGpu(Path(shutil.copytree(exported, tmp_path / "bundle")), "tensorrt-rtx", monkeypatch)


def test_every_way_gives_the_ids_of_the_cpu(simulated: SimulatedGpu) -> None:
    """Deferred ids too; each way finds the slot as the one before left it."""
    ways = {**WAYS, **{name: way for name, way in SEEN.items() if name != "processors"}}
    with simulated.on_cpu() as runtime:
        expected = {name: generated(runtime, PROMPTS[1], **way) for name, way in ways.items()}
    with simulated.open() as runtime:
        assert {name: generated(runtime, PROMPTS[1], **way) for name, way in ways.items()} == expected
    assert sum(expected["greedy"][1][1:]) > 0, "some drafts are accepted"


def test_features_go_from_target_to_head_on_the_device(
    simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In deferred rounds no byte of features or hidden states is uploaded or downloaded."""
    copies: list[tuple[str, int, int]] = []
    for kind in ("upload", "download", "copy"):
        original = getattr(simulated.cuda, kind)

        def noted(target: int, source: int, size: int, kind: str = kind, original: Any = original) -> Any:
            copies.append((kind, target if kind == "upload" else source, size))
            return original(target, source, size)

        monkeypatch.setattr(simulated.cuda, kind, noted)
    with simulated.open() as runtime:
        slot = runtime.open_slot("model")
        assert slot.draft is not None
        areas = {}
        for part, name in ((slot.target, FEATURES), (slot.draft, FEATURE_CACHE), (slot.draft, HIDDEN)):
            memory: Any = part.model.binding.memory[name]
            areas[name] = (memory.address, memory.num_bytes)
        target, drafter = runtime.begin(slot, PROMPTS[0], Settings(30, 3, "model"))
        assert isinstance(drafter, DeferredDrafter)
        _, token = target.verify(PROMPTS[0], ())
        tokens = [*PROMPTS[0], token]
        drafter.prefill(tokens[:-1])
        copies.clear()
        drafted = drafter.propose(tokens, 3)
        accepted, _ = target.verify(tokens, drafted)
        target.rollback(len(tokens) + accepted + 1)
        row_bytes = 2 * 64
        found = [
            (kind, name, size)
            for kind, address, size in copies
            for name, (start, num_bytes) in areas.items()
            if start <= address < start + num_bytes
        ]
        assert found == [("copy", HIDDEN, row_bytes)] * 2 + [("copy", FEATURES, 4 * row_bytes)]
        slot.close()


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


def test_compare_feeds_the_head_its_features(simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "open_device", lambda: simulated.device)
    monkeypatch.setattr(graphs, "SAMPLER_NAMES", ("match",))
    found = compare(simulated.bundle, "tensorrt-rtx")
    assert found.failed == [] and {"target/model.onnx", "target/head.onnx"} <= {row.graph for row in found.results}


@pytest.mark.slow
def test_a_warm_slot_gives_the_same_ids(simulated: SimulatedGpu) -> None:
    with simulated.open() as runtime:
        expected = generated(runtime, PROMPTS[1], **WAYS["greedy"])
    with simulated.open() as runtime:
        runtime.warm()
        assert generated(runtime, PROMPTS[1], **WAYS["greedy"])[:2] == expected[:2]


@pytest.mark.slow
def test_tensorrt_builds_the_head(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With TensorRT's own attention and cache updates."""
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
    bundle = Path(shutil.copytree(exported, tmp_path / "bundle"))
    record = build(bundle, "tensorrt-rtx")
    head = manifest_from_bundle(bundle).draft.model
    assert head is not None and record.engines["draft"].num_bytes < record.engines["target"].num_bytes
    trt = load_library("tensorrt-rtx")
    logger = make_logger(trt)
    network = parse(trt, trt.Builder(logger), logger, bundle / head.graph)
    kinds = Counter(network.get_layer(index).type.name for index in range(network.num_layers))
    print(dict(kinds))
    assert kinds["ATTENTION_INPUT"] == 1 and kinds["KV_CACHE_UPDATE"] == 2
