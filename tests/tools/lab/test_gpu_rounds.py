"""Rounds measured on the CPU and on a simulated GPU: the figures fit together, and waiting is not the host's time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from specrt.tools.lab.gpu_rounds import main, measure
from tests.engines.gpu.simulated_gpu import SimulatedGpu


def test_figures_of_a_simulated_gpu(
    tiny_tensorrt_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
    simulated = SimulatedGpu(Path(shutil.copytree(tiny_tensorrt_bundle, tmp_path / "bundle")), "tensorrt", monkeypatch)
    result = measure(simulated.bundle, {"backend": "tensorrt"}, 24)
    assert (result["backend"], result["device"]) == ("tensorrt", "cuda")
    assert [way["way"] for way in result["ways"]] == ["plain", "model, K = 1", "model, K = 2", "model, K = 3"]
    for way in result["ways"]:
        assert 0 < way["host_ms"] < way["round_ms"], "the stream runs while the host waits"
        assert way["tokens_per_s"] * way["round_ms"] / 1e3 == pytest.approx(way["tokens_per_round"])
        assert way["launch_us"] > 0
    assert len(result["target_pass_ms"]) == 4


def test_the_command_prints_a_table_or_json(tiny_bundle: Path) -> None:
    arguments = [str(tiny_bundle), "--max-new-tokens", "16"]
    text = CliRunner().invoke(main, arguments)
    assert text.exit_code == 0, text.output
    assert "onnxruntime on cpu" in text.output
    data = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
    assert data["device"] == "cpu"
