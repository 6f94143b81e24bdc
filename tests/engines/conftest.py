"""A tiny pair for TensorRT, and the simulated GPU that runs it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.engines.gpu.simulated_gpu import SimulatedGpu
from tests.engines.numpy_samplers.noisy_pair import BACKENDS, K


@pytest.fixture(scope="session")
def noisy_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target in fp16, and as its draft the same with some noise: accepted whole, in part, and not at all."""
    import torch
    from transformers import AutoModelForCausalLM

    from specrt.exporter.export import export
    from specrt.exporter.options import ExportOptions
    from tests.tiny import save_tiny_model, tiny_tokenizer

    root = tmp_path_factory.mktemp("noisy")
    target = save_tiny_model(root / "target")
    model = AutoModelForCausalLM.from_pretrained(target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(0.02 * weights.std() * torch.randn(weights.shape, generator=generator))
    model.save_pretrained(root / "draft")
    tiny_tokenizer().save_pretrained(root / "draft")
    options = ExportOptions(
        str(target), root / "bundle", str(root / "draft"), K, max_seq_len=96, prefill_chunk=32, backend="tensorrt-rtx"
    )
    export(options)
    return root / "bundle"


@pytest.fixture(params=BACKENDS)
def simulated(
    noisy_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> SimulatedGpu:
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
    return SimulatedGpu(Path(shutil.copytree(noisy_bundle, tmp_path / "bundle")), request.param, monkeypatch)
