"""The memory of weights: what is predicted for ONNX Runtime is what a process that loads them really takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specrt.engines.buffers import allocated_bytes, plan_slot
from specrt.engines.manifest import manifest_from_bundle
from specrt.engines.resident import resident_memory
from specrt.engines.trt.record import BuildRecord, EngineEntry
from specrt.exporter.export import export
from specrt.exporter.options import ExportOptions
from tests.tiny import save_tiny_model

TOLERANCE = 0.15  # of the weights, and
BESIDE_BYTES = 16 << 20  # for the session itself: graph, kernels, arenas

_MEASURE = """
import json, sys
from pathlib import Path
from specrt.engines.manifest import manifest_from_bundle
from specrt.engines.ort.cpu import OrtEngine
from specrt.engines.contract import model_contract

def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

bundle = Path(sys.argv[1])
entry = manifest_from_bundle(bundle).target
before = anonymous_bytes()
engine = OrtEngine(bundle / entry.graph, model_contract(entry.spec), threads=1)
print(json.dumps(anonymous_bytes() - before))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.slow), "fp16"])
def test_onnxruntime_takes_the_predicted_memory(dtype: str, tmp_path: Path) -> None:
    """A model large enough that its weights, some tens of MB, stand out from what a session takes anyway."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_hidden_layers": 4}
    model = save_tiny_model(tmp_path / "model", **sizes)
    export(ExportOptions(str(model), tmp_path / "bundle", dtype=dtype))
    manifest = manifest_from_bundle(tmp_path / "bundle")
    (row,) = resident_memory(manifest)
    measured = int(
        json.loads(
            subprocess.run(
                [sys.executable, "-c", _MEASURE, str(tmp_path / "bundle")], capture_output=True, text=True, check=True
            ).stdout
        )
    )
    assert row.private_bytes is not None and row.private_bytes > 2 * BESIDE_BYTES
    assert abs(measured - row.private_bytes) <= TOLERANCE * row.private_bytes + BESIDE_BYTES
    assert row.slot_bytes == allocated_bytes(plan_slot(manifest, "onnxruntime"))
    assert row.mapped_bytes == manifest.target.weights_bytes


def test_engines_take_their_size_which_is_unknown_before_they_are_built(tiny_tensorrt_bundle: Path) -> None:
    manifest = manifest_from_bundle(tiny_tensorrt_bundle)
    engine = EngineEntry("target.engine", {}, "float16", {}, 1000, "", 1.0)
    record = BuildRecord(
        1, "", "", "tensorrt-rtx", "tensorrt_rtx", "1.7", (), {"target": engine, "samplers/match": engine}
    )
    rtx, plain = resident_memory(manifest, [record])
    assert (rtx.backend, rtx.private_bytes, rtx.mapped_bytes) == ("tensorrt-rtx", 2000, 0)
    assert (plain.backend, plain.private_bytes) == ("tensorrt", None)
    assert rtx.slot_bytes == plain.slot_bytes == allocated_bytes(plan_slot(manifest, "tensorrt"))
