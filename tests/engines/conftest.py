"""A tiny pair for TensorRT, and the simulated GPU that runs it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.engines.gpu.simulated_gpu import SimulatedGpu
from tests.engines.numpy_samplers.noisy_pair import BACKENDS, K
from tests.exports import Exports, made_once


@pytest.fixture(scope="session")
def noisy_draft(exports: Exports) -> Path:
    """The tiny Llama with some noise: accepted by the tiny Llama whole, in part, and not at all."""
    target = exports.model()

    def save_noisy(folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from tests.tiny import tiny_tokenizer

        model = AutoModelForCausalLM.from_pretrained(target)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weights in model.parameters():
                weights.add_(0.02 * weights.std() * torch.randn(weights.shape, generator=generator))
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)

    return made_once(target.with_name("noisy"), save_noisy)


@pytest.fixture(scope="session")
def noisy_bundle(exports: Exports, noisy_draft: Path) -> Path:
    """The tiny Llama and ``noisy_draft`` in fp16."""
    options = {"max_seq_len": 96, "prefill_chunk": 32, "backend": "tensorrt-rtx"}
    return exports.bundle(exports.model(), str(noisy_draft), K, **options)


@pytest.fixture(params=BACKENDS)
def simulated(
    noisy_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> SimulatedGpu:
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
    return SimulatedGpu(Path(shutil.copytree(noisy_bundle, tmp_path / "bundle")), request.param, monkeypatch)
