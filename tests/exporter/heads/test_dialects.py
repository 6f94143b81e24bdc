"""A head in every dialect: the drafts of a computation without caches, and ids on every backend."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from transformers import AutoModelForCausalLM

import specrt
from specrt.engines.interface import CUDA
from specrt.engines.manifest import manifest_from_bundle
from specrt.exporter import options
from tests.engines.gpu.simulated_gpu import SimulatedGpu
from tests.engines.numpy_samplers.noisy_pair import WAYS, K, generated
from tests.engines.ort.simulated_ort import simulate_gpu
from tests.exporter.heads.oracle import Faults, reference_rounds
from tests.exporter.heads.pairs import DIALECTS, PROMPTS, head_bundle, head_pair
from tests.exporter.heads.test_export import NUM_TOKENS, rounds_of
from tests.exporter.tracing.tensorrt_10_3 import objections
from tests.exports import Exports


@pytest.fixture
def bundle_of(exports: Exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """(dialect, dtype) -> a copy of the bundle. No engine computes in fp32, ONNX Runtime does with the same graphs."""
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
    for dialect in ("standard", "standard-22"):
        monkeypatch.setitem(options._DTYPES, (dialect, CUDA), (("fp16", "fp32"), "for this test"))

    def bundle(dialect: str, dtype: str) -> Path:
        made = head_bundle(exports, **{**DIALECTS[dialect], "dtype": dtype}, max_seq_len=128, num_speculative_tokens=K)
        assert manifest_from_bundle(made).target.spec.dialect == dialect
        return Path(shutil.copytree(made, tmp_path / "bundle"))

    return bundle


@pytest.mark.parametrize("dialect", [pytest.param("standard", marks=pytest.mark.slow), "standard-22"])
def test_rounds_are_those_of_a_computation_without_caches(
    dialect: str, bundle_of: Callable[[str, str], Path], exports: Exports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same drafted ids as in the dialect ``onnxruntime``, the ids of plain decoding, and all again in used slots.

    The control: those of a head with a fault are others.
    """
    pair = head_pair(exports)
    target = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()
    expected = [reference_rounds(target, pair.head, prompt, K, NUM_TOKENS) for prompt in PROMPTS]
    faulty = reference_rounds(target, pair.head, PROMPTS[0], K, NUM_TOKENS, Faults(keeps_own_rows=True))
    assert sum(accepted for _, accepted in expected[0]) > 3 and faulty != expected[0]
    simulated = SimulatedGpu(bundle_of(dialect, "fp32"), DIALECTS[dialect]["backend"], monkeypatch)
    for opened in (simulated.on_cpu, simulated.open):
        with opened() as runtime:
            plain = [runtime.generate(p, max_new_tokens=NUM_TOKENS, draft="none", ignore_eos=True) for p in PROMPTS]
            slot = runtime.open_slot("model")
            for _ in range(2):
                found = [rounds_of(runtime, slot, prompt, K) for prompt in PROMPTS]
                assert found == [(e, p.token_ids) for e, p in zip(expected, plain, strict=True)]
            slot.close()


@pytest.mark.slow
def test_ids_on_onnxruntime_s_cuda_are_those_of_the_cpu(
    bundle_of: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, module = bundle_of("onnxruntime", "fp16"), simulate_gpu(monkeypatch)
    with specrt.load(bundle, threads=1) as runtime:
        expected = {name: generated(runtime, PROMPTS[1], **way) for name, way in WAYS.items()}
    assert sum(expected["greedy"][1][1:]) > 0, "some drafts are accepted"
    with specrt.load(bundle, device="cuda") as runtime:
        assert {name: generated(runtime, PROMPTS[1], **way) for name, way in WAYS.items()} == expected
    assert all(session.is_strict for session in module.sessions), "no node is on the CPU"


def test_the_parser_of_tensorrt_10_3_takes_the_pair(bundle_of: Callable[[str, str], Path]) -> None:
    """The target with its features, the head, and the samplers of both."""
    graphs = sorted(bundle_of("standard-22", "fp16").rglob("*.onnx"))
    assert {"model.onnx", "head.onnx", "match.onnx"} <= {path.name for path in graphs}
    found = {path.name: list(objections(onnx.load(path, load_external_data=False))) for path in graphs}
    assert found == {path.name: [] for path in graphs}
