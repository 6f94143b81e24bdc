"""``specrt build`` and what ``specrt inspect`` shows of engines, from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from specrt.engines.samplers import SAMPLER_NAMES
from specrt.engines.trt.record import engines_folder
from specrt.tools.cli import main


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))


def specrt(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_build_then_inspect(tiny_tensorrt_bundle: Path, tmp_path: Path) -> None:
    bundle = str(shutil.copytree(tiny_tensorrt_bundle, tmp_path / "bundle"))
    result = specrt("build", bundle, "--backend", "tensorrt-rtx", "--compute-capability", "8.9")
    assert result.exit_code == 0, result.output
    assert f"{2 + len(SAMPLER_NAMES)} engines" in result.output and "for compute capability 8.9" in result.output
    result = specrt("inspect", bundle, "--check")
    assert result.exit_code == 0, result.output
    assert "tensorrt-rtx: tensorrt_rtx 1.7" in result.output
    (record,) = json.loads(specrt("inspect", bundle, "--json").output)["builds"]
    assert record["compute_capabilities"] == ["8.9"]
    engine = engines_folder(Path(bundle), "tensorrt-rtx") / "target.engine"
    engine.write_bytes(engine.read_bytes()[:-1])
    assert specrt("inspect", bundle).exit_code == 0
    result = specrt("inspect", bundle, "--check")
    assert result.exit_code == 6
    assert result.output.startswith("specrt: error: ") and "--backend tensorrt-rtx --force" in result.output


def test_refusals_are_one_line_with_their_exit_code(tiny_tensorrt_bundle: Path, tmp_path: Path) -> None:
    for arguments, code in (
        ((str(tmp_path / "nothing"), "--backend", "tensorrt-rtx"), 6),
        ((str(tiny_tensorrt_bundle), "--backend", "openvino"), 9),
        ((str(tiny_tensorrt_bundle), "--backend", "tensorrt-rtx", "--compute-capability", "1.0"), 2),
    ):
        result = specrt("build", *arguments)
        assert result.exit_code == code, result.output
        assert len(result.output.strip().splitlines()) == 1
