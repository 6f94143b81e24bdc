"""Engines of what an export can ask for next to plain fp16: weights in integers, bf16, sliding windows. Really
built.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from specrt.engines.samplers import SAMPLER_NAMES
from specrt.engines.trt.build import build
from specrt.engines.trt.record import record_from_bundle
from specrt.exporter.export import export
from specrt.exporter.options import ExportOptions
from tests.engines.trt.test_build import BACKEND, CHUNK, K
from tests.exporter.tracing.architectures import tiny_config
from tests.tiny import save_tiny_model, tiny_tokenizer


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_weights_in_integers_become_engines(quantize: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": True, "initializer_range": 0.06}
    model = save_tiny_model(tmp_path / "model", **sizes)
    options = ExportOptions(
        str(model), tmp_path / "b", f"self:{quantize}", K, 96, CHUNK, quantize=quantize, backend=BACKEND
    )
    manifest = export(options)
    assert manifest.draft.model is not None
    assert manifest.target.quantization == manifest.draft.model.quantization == quantize
    assert manifest.target.parity.mean_kl < {"int8": 0.01, "int4": 0.5}[quantize]
    num_weights = 2 * (4 * 256 * 256 - 2 * 128 * 256 + 3 * 512 * 256)  # projections; K and V have half the heads
    table = len(tiny_tokenizer()) * 256
    expected = table + num_weights * {"int8": 1, "int4": 0.5 + 2 / 32}[quantize]
    assert expected < manifest.target.weights_bytes < 1.1 * expected
    assert abs(manifest.target.bytes_per_pass - manifest.target.weights_bytes) < 0.01 * expected
    record = build(tmp_path / "b", BACKEND)
    assert record.engines["target"].precision == "float16"
    assert record_from_bundle(tmp_path / "b", BACKEND) == record


@pytest.mark.slow
def test_sliding_windows_and_bf16_build(tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    model = save_tiny_model(tmp_path / "model", tiny_config("gemma3", vocab_size=len(tiny_tokenizer()), **layers))
    options = ExportOptions(str(model), tmp_path / "bundle", "self", K, 96, CHUNK, "bf16", backend=BACKEND)
    assert export(options).target.spec.dtype == "bfloat16"
    record = build(tmp_path / "bundle", BACKEND)
    assert list(record.engines) == ["target", *(f"samplers/{name}" for name in SAMPLER_NAMES)]
    assert record.engines["target"].precision == "bfloat16"
    assert record_from_bundle(tmp_path / "bundle", BACKEND) == record
