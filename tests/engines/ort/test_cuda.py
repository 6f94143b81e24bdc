"""ONNX Runtime on CUDA, and draft and target in different places, on a simulated GPU."""

from __future__ import annotations

import itertools
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as real_ort
import pytest

import specrt
from specrt.engines.errors import BackendError, PlacementWarning, UsageError
from specrt.engines.ort import cuda as ort_cuda
from specrt.runtime.options import options_of
from specrt.runtime.runtime import Runtime
from specrt.runtime.settings import settings_of
from specrt.tools.rounds import run_rounds
from tests.engines.ort.simulated_ort import SimulatedOrt, simulate_gpu
from tests.exports import Exports

K, NUM_TOKENS = 3, 24
PROMPT = "The quick brown fox jumps over the lazy dog. The quick brown fox"
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"draft": "none"},
    "greedy": {"draft": "model"},
    "ngram": {"draft": "ngram"},
    "seed": {"draft": "model", "temperature": 0.8, "seed": 3},
    "block": {"draft": "model", "temperature": 0.8, "seed": 3, "rule": "block", "top_p": 0.9},
    "regex": {"draft": "model", "regex": "([a-d]{2}[^a-z]?xyz)+", "temperature": 0.8, "seed": 3, "rule": "block"},
    "penalties": {"draft": "model", "frequency_penalty": 0.4, "temperature": 0.8, "seed": 5},
}


@pytest.fixture(scope="module")
def half(exports: Exports) -> Path:
    """A tiny bundle in fp16 that drafts for itself."""
    return exports.bundle(exports.model(), "self", K, max_seq_len=96, prefill_chunk=32, dtype="fp16")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedOrt:
    return simulate_gpu(monkeypatch)


def generated(runtime: Runtime, **way: Any) -> tuple[list[int], list[int]]:
    if way.get("draft") != "none":
        way["num_speculative_tokens"] = K
    result = runtime.generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True, **way)
    return result.token_ids, result.stats.acceptance_histogram


def test_ids_are_those_of_the_cpu(half: Path, gpu: SimulatedOrt) -> None:
    with specrt.load(half, threads=1) as runtime:
        expected = {name: generated(runtime, **way) for name, way in WAYS.items()}
    with specrt.load(half, device="cuda") as runtime:
        assert runtime.device == "cuda"
        found = {name: generated(runtime, **way) for name, way in WAYS.items()}
    assert found == expected
    assert all(session.is_strict for session in gpu.sessions), "no node on the CPU, and so no copies in the round"


@pytest.mark.parametrize("name", ["greedy", "seed", "block"])
def test_the_host_waits_once_a_round(half: Path, gpu: SimulatedOrt, name: str) -> None:
    with specrt.load(half, device="cuda") as runtime:
        given: Any = {"max_new_tokens": 64, "ignore_eos": True, "num_speculative_tokens": K, **WAYS[name]}
        settings, slot = settings_of(options_of(given), runtime.manifest), runtime.open_slot("model")
        marks: list[Counter[str]] = []
        prompt = runtime.codec.encode(PROMPT)
        run_rounds(runtime, slot, prompt, settings, lambda *_: marks.append(gpu.cuda.counts.copy()))
        slot.close()
    rounds = [after - before for before, after in itertools.pairwise(marks[3:])]
    assert len(rounds) > 3
    assert {(seen["wait"], seen["allocate"], seen["allocate_pinned"]) for seen in rounds} == {(1, 0, 0)}


@pytest.mark.parametrize("places", [("cpu", "cuda"), ("cuda", "cpu")])
def test_draft_and_target_on_different_devices(half: Path, gpu: SimulatedOrt, places: tuple[str, str]) -> None:
    """They share no memory: only ``match``, which is what sampling then uses; another rule is refused."""
    with specrt.load(half, threads=1) as runtime:
        names = ["greedy", "seed", "penalties"]
        expected = {name: generated(runtime, **WAYS[name]) for name in names}
    with specrt.load(half, threads=1, device=places[0], draft_device=places[1]) as runtime:
        assert {name: generated(runtime, **WAYS[name]) for name in names} == expected
        with pytest.raises(UsageError, match="rule: got 'block', but the draft is on another device"):
            generated(runtime, **WAYS["block"])
        settings = runtime.stream(PROMPT, temperature=1.0).settings
        assert (settings.rule, settings.sources["rule"]) == ("match", "the draft is on another device")


def test_a_provider_that_is_not_there_or_not_in_force_is_an_error(half: Path, gpu: SimulatedOrt) -> None:
    gpu.available = ("CPUExecutionProvider",)
    with pytest.raises(BackendError, match="this onnxruntime has no CUDAExecutionProvider, only CPUExecution"):
        specrt.load(half, device="cuda")
    gpu.available, gpu.in_force = ("CUDAExecutionProvider",), "CPUExecutionProvider"
    with pytest.raises(BackendError, match="expected CUDAExecutionProvider, got CPUExecutionProvider"):
        specrt.load(half, device="cuda")


def test_a_library_of_cuda_that_is_missing_is_named(half: Path, gpu: SimulatedOrt) -> None:
    """ONNX Runtime prints it, and runs on the CPU."""
    gpu.in_force, gpu.unloadable = "CPUExecutionProvider", "Failed to load libcudnn.so.9: cannot open\nand more"
    message = r"or of another version \(Failed to load libcudnn\.so\.9: cannot open\); .*pip install 'specrt\[gpu\]'"
    with pytest.raises(BackendError, match=message) as error:
        specrt.load(half, device="cuda")
    assert "\n" not in str(error.value)


def test_the_probe_of_the_provider_is_a_graph() -> None:
    session = real_ort.InferenceSession(ort_cuda._PROBE, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": np.ones(1, np.float32)})
    assert found.tolist() == [1.0]


def test_the_extra_installs_cuda_and_cudnn() -> None:
    """``onnxruntime-gpu`` alone needs both from the system, and a machine with a driver only has neither."""
    with (Path(__file__).resolve().parents[3] / "pyproject.toml").open("rb") as file:
        extra = tomllib.load(file)["project"]["optional-dependencies"]["gpu"]
    found = [name for name in extra if name.startswith("onnxruntime-gpu")]
    assert found and all(name.startswith("onnxruntime-gpu[cuda,cudnn]") for name in found)


def test_nodes_on_the_cpu_are_announced(half: Path, gpu: SimulatedOrt) -> None:
    gpu.on_cpu = {"samplers"}
    with (
        specrt.load(half, device="cuda") as runtime,
        pytest.warns(PlacementWarning, match="runs on the CPU"),
    ):
        found = generated(runtime, **WAYS["plain"])
    with specrt.load(half, threads=1) as runtime:
        assert generated(runtime, **WAYS["plain"]) == found


def test_fp32_has_no_attention_on_cuda(tiny_bundle: Path, gpu: SimulatedOrt) -> None:
    with pytest.raises(BackendError, match="its KV cache is float32, on CUDA it must be float16 or bfloat16; export"):
        specrt.load(tiny_bundle, device="cuda")


def test_without_a_gpu_the_error_is_one_line(half: Path) -> None:
    if "CUDAExecutionProvider" in real_ort.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    with pytest.raises(BackendError, match=r"device cuda: .*(driver|install)"):
        specrt.load(half, device="cuda")


def test_a_draft_that_is_no_model_runs_nowhere(gpu: SimulatedOrt, exports: Exports) -> None:
    bundle = exports.bundle(exports.model(), "ngram", quantize="int8", prefill_chunk=64)
    with pytest.raises(UsageError, match="draft device: this bundle has no draft model, got cpu"):
        specrt.load(bundle, draft_device="cpu")
