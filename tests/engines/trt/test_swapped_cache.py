"""A bundle for TensorRT 10.3, whose cache is in two buffers: generations on ONNX Runtime and on a simulated GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import specrt
from specrt.engines.buffers import plan_slot
from specrt.engines.contract import STANDARD_22_DIALECT
from specrt.engines.errors import BundleError
from specrt.engines.manifest import MANIFEST_NAME, manifest_from_bundle
from specrt.engines.trt.build import build
from specrt.engines.trt.engine import TrtBackend, TrtBinding
from specrt.exporter.options import ExportOptions
from tests.engines.gpu.simulated_gpu import SimulatedGpu
from tests.engines.numpy_samplers.noisy_pair import PROMPT, WAYS, K, generated
from tests.exporter.tracing.architectures import tiny_config
from tests.exports import Exports

OPTIONS = {"max_seq_len": 96, "prefill_chunk": 32, "dtype": "fp16"}
OLD = {**OPTIONS, "backend": "tensorrt", "tensorrt_version": "10.3"}
GREEDY = ("plain", "greedy", "reproducible", "ngram")
NUM_COMPARED = 24  # tokens: the dialects round fp16 otherwise, and on some later token two logits are too close
SAMPLED = ("seed, filters", "block")  # their draws differ where kernels round otherwise


@pytest.fixture(scope="module")
def swapping(exports: Exports, noisy_draft: Path) -> Path:
    return exports.bundle(exports.model(), str(noisy_draft), K, **OLD)


def on(bundle: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    monkeypatch.setenv("SPECRT_CACHE", str(folder / "cache"))
    return SimulatedGpu(Path(shutil.copytree(bundle, folder / "bundle")), "tensorrt", monkeypatch)


def test_ids_are_those_of_the_dialect_of_later_versions(
    swapping: Path, noisy_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU and on the GPU, with drafts that are accepted and rolled back, and a prompt that goes on."""
    assert manifest_from_bundle(swapping).target.spec.dialect == STANDARD_22_DIALECT
    with on(noisy_bundle, tmp_path / "later", monkeypatch).on_cpu() as runtime:
        expected = {name: generated(runtime, **WAYS[name])[0] for name in GREEDY}
        prompt = [*runtime.codec.encode(PROMPT), *expected["greedy"][:5]]
    simulated, found = on(swapping, tmp_path, monkeypatch), []
    for opened in (simulated.on_cpu, simulated.open):
        with opened() as runtime:
            found.append({name: generated(runtime, **WAYS[name]) for name in (*GREEDY, *SAMPLED)})
            found[-1]["longer"] = generated(runtime, prompt, **WAYS["greedy"])
    assert {name: found[0][name][0][:NUM_COMPARED] for name in GREEDY} == {
        n: e[:NUM_COMPARED] for n, e in expected.items()
    }
    assert found[0] == found[1]
    assert found[0]["longer"][2] > 0, "a prefix is used again"
    accepted = found[0]["block"][1]
    assert sum(accepted[1:]) > 0 and sum(accepted[:-1]) > 0, "some drafts are accepted, and some rolled back"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2-head-of-12", "qwen3"])
def test_ids_of_other_architectures(
    name: str, exports: Exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = exports.model(tiny_config(name, vocab_size=320, initializer_range=0.3))
    ways = [WAYS["plain"], {"draft": "ngram"}]
    with specrt.load(exports.bundle(model, "ngram", K, **{**OPTIONS, "dtype": "fp32"}), threads=1) as runtime:
        expected = [generated(runtime, **dict(way))[0] for way in ways]
    with on(exports.bundle(model, "ngram", K, **OLD), tmp_path, monkeypatch).open() as runtime:
        assert [generated(runtime, **dict(way))[0] for way in ways] == expected


def test_each_place_of_the_buffers_has_its_context_and_graph(
    swapping: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulation refuses an address that is moved after a capture, so one graph for both places would fail."""
    monkeypatch.setattr(TrtBackend, "uses_graphs", True)
    simulated = on(swapping, tmp_path, monkeypatch)
    with simulated.open() as runtime:
        generated(runtime, **WAYS["plain"])
        (binding,) = [slot.target.model.binding for slot in runtime._pool._idle]
        assert isinstance(binding, TrtBinding)
        one_token = [key for key in binding._kept if key[0] == 1]
    assert sorted(turn for _, _, turn in one_token) == [0, 1]
    assert simulated.cuda.counts["capture"] >= 2


def test_the_second_buffers_are_in_the_plan(swapping: Path) -> None:
    manifest = manifest_from_bundle(swapping)
    plan = {buffer.name: buffer for buffer in plan_slot(manifest, "tensorrt", scratch_bytes=0)}
    past, present = plan["target/past_key.0"], plan["target/present_key.0"]
    assert (past.alias, present.alias, past.num_bytes) == (None, None, present.num_bytes)
    cache = [buffer.num_bytes for name, buffer in plan.items() if name.startswith(("target/past_", "target/present_"))]
    assert sum(cache) == manifest.target.spec.kv_bytes


def test_a_draft_of_the_target_has_a_cache_of_its_own(
    exports: Exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = exports.bundle(exports.model(), "self:int8", K, **OLD)
    assert not manifest_from_bundle(exported).draft.shares_kv
    simulated = on(exported, tmp_path, monkeypatch)
    with simulated.on_cpu() as runtime:
        expected = generated(runtime, **WAYS["greedy"])
    with simulated.open() as runtime:
        assert generated(runtime, **WAYS["greedy"]) == expected
    assert sum(expected[1][1:]) > 0
    path = simulated.bundle / MANIFEST_NAME
    path.write_text(path.read_text(encoding="utf-8").replace('"shares_kv": false', '"shares_kv": true'), "utf-8")
    with pytest.raises(BundleError, match="dialect 'standard-22' has no cache that a draft can share"):
        manifest_from_bundle(simulated.bundle)
    assert ExportOptions("m", Path("b"), "self:int8", backend="tensorrt").shares_kv


def test_tensorrt_rtx_builds_it(swapping: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parser and builder stand for those of TensorRT 10.3, which is not here."""
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
    bundle = Path(shutil.copytree(swapping, tmp_path / "bundle"))
    assert {"target", "draft"} < build(bundle, "tensorrt-rtx").engines.keys()
