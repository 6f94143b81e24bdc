"""SmolLM2 for TensorRT-RTX: its graph answers the same in passes of any width, and becomes engines of bounded size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specrt.engines.errors import SpecrtError
from specrt.engines.manifest import LOGITS_TOLERANCE, manifest_from_bundle
from specrt.engines.samplers import SAMPLER_NAMES
from specrt.engines.trt.build import build
from specrt.engines.trt.record import check_build
from specrt.exporter.export import export
from specrt.exporter.options import ExportOptions
from specrt.tools.lab.models import fetch
from tests.exporter.passes.passes_on_ort import Passes

pytestmark = [pytest.mark.model, pytest.mark.slow]

K = 5
PAST = (0, 1, 5, 100)
MAX_BYTES_OVER_WEIGHTS = 1.15
# Of weights in integers: the engine's bytes over the fp16 weights (docs/gpu.md says the bottleneck int4), and KL in
# nats.
QUANTIZED = {"int4": (0.47, 0.8)}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        gguf = fetch("smollm2-135m")
    except SpecrtError as error:
        pytest.skip(f"SmolLM2-135M cannot be fetched here: {error}")
    output = tmp_path_factory.mktemp("smollm2") / "bundle"
    export(ExportOptions(str(gguf), output, num_speculative_tokens=K, max_seq_len=512, backend="tensorrt-rtx"))
    return output


def test_rows_equal_single_rows_equal_no_cache(bundle: Path) -> None:
    """Torch's own logits were compared at export; here a pass over everything stands for the model without a cache."""
    entry = manifest_from_bundle(bundle).target
    assert entry.parity.argmax_agreement == 1.0
    stored = np.load(bundle / entry.reference)
    scale = np.abs(stored["logits"]).max()
    passes = Passes(bundle / entry.graph, entry.spec, np.resize(stored["ids"], max(PAST) + K + 1))
    for past in PAST:
        for n in (1, 2, 3, K + 1):
            expected = passes.without_cache(past, n)
            for widths in ([n], [1] * n):
                error = np.abs(passes.logits(past, widths) - expected).max() / scale
                assert error <= LOGITS_TOLERANCE["float16"], f"past {past}, passes of {widths}: {error:.2e}"


def test_engines_are_hardly_larger_than_the_weights(bundle: Path) -> None:
    manifest = manifest_from_bundle(bundle)
    record = build(bundle, "tensorrt-rtx")
    assert set(record.engines) == {"target", *(f"samplers/{name}" for name in SAMPLER_NAMES)}
    assert record.engines["target"].num_bytes <= MAX_BYTES_OVER_WEIGHTS * manifest.target.weights_bytes
    assert check_build(bundle, manifest, record, record.builder_version, "8.9") == []


@pytest.mark.parametrize("quantize", sorted(QUANTIZED))
def test_weights_in_integers(quantize: str, bundle: Path, tmp_path: Path) -> None:
    full = manifest_from_bundle(bundle).target
    options = ExportOptions(
        full.source,
        tmp_path / "b",
        num_speculative_tokens=K,
        max_seq_len=512,
        quantize=quantize,
        backend="tensorrt-rtx",
    )
    entry = export(options).target
    share, kl = QUANTIZED[quantize]
    assert (entry.quantization, entry.bytes_per_pass <= 1.01 * entry.weights_bytes) == (quantize, True)
    assert 0 < entry.parity.mean_kl < kl
    stored = np.load(tmp_path / "b" / entry.reference)
    scale = np.abs(stored["logits"]).max()
    passes = Passes(tmp_path / "b" / entry.graph, entry.spec, np.resize(stored["ids"], 16))
    for past in (0, 5):
        expected = passes.without_cache(past, K + 1)
        for widths in ([K + 1], [1] * (K + 1)):
            assert np.abs(passes.logits(past, widths) - expected).max() / scale <= LOGITS_TOLERANCE["float16"]
    record = build(tmp_path / "b", "tensorrt-rtx")
    assert record.engines["target"].num_bytes <= share * full.weights_bytes
