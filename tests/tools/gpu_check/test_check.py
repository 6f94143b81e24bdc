"""The runner of the experiments: limits, crashes, reasons, the report's two files, exit codes, and what it needs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from specrt.engines.errors import UsageError
from specrt.engines.manifest import manifest_from_bundle
from specrt.engines.storage.integrity import check_files
from specrt.tools.gpu_check import check
from specrt.tools.gpu_check.check import Report, gpu_check
from specrt.tools.gpu_check.kit import KIT_NAME, Kit, fill, kit_in, unpacked
from specrt.tools.gpu_check.make import _restamp
from specrt.tools.gpu_check.page import page
from specrt.tools.gpu_check.table import EXPERIMENTS, TOTAL_S
from tests.conftest import has_nvidia_gpu
from tests.tools.commands import invoke, one_error_line
from tests.tools.gpu_check.made import ALL

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def report(tiny_tensorrt_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    monkeypatch.setattr(check, "_find_gpu", lambda: ({"name": "a card", "compute capability": "8.9"}, ""))
    monkeypatch.chdir(ROOT)
    return gpu_check(tiny_tensorrt_bundle, ALL)


def test_every_experiment_gets_a_verdict_and_keeps_its_figures(report: Report) -> None:
    found = {outcome.name: outcome for outcome in report.outcomes}
    assert {name: outcome.verdict for name, outcome in found.items()} == {
        "passes": "passed",
        "fails": "failed",
        "finds no file": "failed",
        "skips": "skipped",
        "hangs": "timed out",
        "crashes": "crashed",
        "raises": "crashed",
        "lacks a module": "skipped",
        "lacks a part": "skipped",
    }
    assert found["passes"].figures["by width"] == {"1": 0.25, "2": 0.5}
    assert found["hangs"].figures == {"before": 1}
    assert 2 <= found["hangs"].seconds < 10
    assert found["crashes"].figures == {"before": 2}
    assert "an unexpected name" in found["raises"].reason
    assert found["lacks a module"].reason == "needs no-such-package, which is not installed"
    assert found["lacks a part"].reason.startswith("needs layers of a kit")
    assert report.exit_code == 1
    text = page(report)
    assert "a card, compute capability 8.9" in text
    assert "| fails | ? | failed |" in text and "differ \\| by one |" in text
    assert "| by width: 1 | 0.25 |" in text
    for verdicts, code in ((("passed", "skipped"), 0), (("skipped",), 9), (("passed", "timed out"), 1)):
        chosen = tuple(o for o in report.outcomes if o.verdict in verdicts)
        assert replace(report, outcomes=chosen).exit_code == code


def test_the_report_names_no_folder(report: Report, tiny_tensorrt_bundle: Path) -> None:
    """Neither in figures nor in a reason; what experiments get is a copy in a temporary folder."""
    found = {outcome.name: outcome for outcome in report.outcomes}
    assert found["passes"].figures["bundle"] == KIT_NAME
    assert found["finds no file"].reason == "model.onnx: not readable"
    for text in (page(report), json.dumps(report.as_dict())):
        assert tempfile.gettempdir() not in text and str(tiny_tensorrt_bundle.parent) not in text


def test_the_time_of_all_is_limited(tiny_tensorrt_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_find_gpu", lambda: ({"name": "a card", "compute capability": "8.9"}, ""))
    monkeypatch.chdir(ROOT)
    done = gpu_check(tiny_tensorrt_bundle, ALL[4:6], total_s=1.5)
    assert [outcome.verdict for outcome in done.outcomes] == ["timed out", "skipped"]
    assert done.outcomes[1].reason == "the time for all experiments is used up"
    assert sum(experiment.limit_s for experiment in EXPERIMENTS) <= TOTAL_S == 480
    assert len(EXPERIMENTS) == 10


def test_a_driver_that_hangs_is_a_reason(tiny_tensorrt_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "FIND_S", 0.01)
    monkeypatch.chdir(ROOT)
    (outcome,) = gpu_check(tiny_tensorrt_bundle, ALL[:1]).outcomes
    assert (outcome.verdict, outcome.reason) == ("skipped", "the driver did not answer in 0 s")


def test_without_a_gpu_everything_is_skipped_and_written(tiny_tensorrt_bundle: Path, tmp_path: Path) -> None:
    if has_nvidia_gpu():
        pytest.skip("a GPU is there")
    output = tmp_path / "figures.json"
    before = {path: path.stat().st_mtime_ns for path in tiny_tensorrt_bundle.rglob("*")}
    result = invoke("gpu-check", tiny_tensorrt_bundle, "--output", output)
    assert (result.exit_code, "no experiment could run" in one_error_line(result)) == (9, True)
    stored = json.loads(output.read_text())
    assert len(stored["outcomes"]) == 10
    assert all(outcome["verdict"] == "skipped" and outcome["reason"] for outcome in stored["outcomes"])
    assert stored["gpu"] is None
    assert stored["no_gpu"] in output.with_suffix(".md").read_text()
    assert {path: path.stat().st_mtime_ns for path in tiny_tensorrt_bundle.rglob("*")} == before


def test_it_needs_no_library_but_numpy(tiny_tensorrt_bundle: Path, tmp_path: Path) -> None:
    """With every other dependency blocked, in the parent and in its experiments."""
    blocked = ["click", "rich", "tokenizers", "jinja2", "onnxruntime", "tensorrt_rtx", "torch", "onnx", "polygraphy"]
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({blocked!r}))\n")
    command = [sys.executable, "-m", "specrt.tools.gpu_check", str(tiny_tensorrt_bundle), "-o", "figures.json"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin", "SPECRT_ROOT": str(ROOT)},
    )
    assert done.stderr == ""
    assert done.returncode == (9 if not has_nvidia_gpu() else done.returncode)
    verdicts = {o["name"]: o for o in json.loads((tmp_path / "figures.json").read_text())["outcomes"]}
    assert verdicts["rtx"]["reason"] == "needs tensorrt-rtx, which is not installed"
    assert verdicts["memory"]["reason"] == "needs tokenizers, which is not installed"


def test_what_is_no_kit_is_refused_before_anything_runs(tmp_path: Path) -> None:
    result = invoke("gpu-check", tmp_path / "missing.tar.gz", "--output", tmp_path / "figures.json")
    assert (result.exit_code, "missing.tar.gz: not found; make a kit" in one_error_line(result)) == (2, True)
    (tmp_path / "text.tar.gz").write_text("no archive")
    result = invoke("gpu-check", tmp_path / "text.tar.gz", "--output", tmp_path / "figures.json")
    assert (result.exit_code, "text.tar.gz: not a kit" in one_error_line(result)) == (2, True)
    result = invoke("gpu-check", tmp_path, "--output", tmp_path / "figures.json")
    assert (result.exit_code, "no bundle and no kit is there" in one_error_line(result)) == (2, True)
    result = invoke("gpu-check", tmp_path, "--output", tmp_path / "figures.txt")
    assert (result.exit_code, "expected a name that ends in .json" in one_error_line(result)) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.tar.gz"]


def test_a_kit_is_an_archive_whose_weights_come_from_a_seed(tiny_tensorrt_bundle: Path, tmp_path: Path) -> None:
    """As ``make`` stores the layers of a 1.5B: their manifest has the SHA-256 of weights that are not in the file."""
    source = tmp_path / "source"
    shutil.copytree(tiny_tensorrt_bundle, source / "standard")
    layers = Path(shutil.copytree(tiny_tensorrt_bundle, source / "layers"))
    weights = layers / manifest_from_bundle(layers).target.weights[0]
    size = weights.stat().st_size
    weights.unlink()
    fill(layers)
    assert weights.stat().st_size == size
    _restamp(layers)
    weights.unlink()
    with tarfile.open(tmp_path / "kit.tar.gz", "w:gz") as archive:
        archive.add(source, KIT_NAME)
    (tmp_path / "work").mkdir()
    kit = kit_in(unpacked(tmp_path / "kit.tar.gz", tmp_path / "work"))
    assert kit.layers is not None and kit.standard is not None
    fill(kit.layers)
    check_files(kit.layers, manifest_from_bundle(kit.layers), always_hash=True)
    assert kit == Kit(kit.standard, layers=kit.layers)
    with pytest.raises(UsageError, match="not found"):
        unpacked(tmp_path / "other", tmp_path / "work")


@pytest.mark.parametrize("name", [f"{KIT_NAME}/../outside", "/outside", "other/file", "link"])
def test_an_archive_writes_below_its_folder_only(name: str, tmp_path: Path) -> None:
    """With Pythons that cannot filter members, too."""
    with tarfile.open(tmp_path / "kit.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo(f"{KIT_NAME}/link" if name == "link" else name)
        member.type, member.linkname = (tarfile.SYMTYPE, "/") if name == "link" else (tarfile.REGTYPE, "")
        archive.addfile(member)
    (tmp_path / "work").mkdir()
    with pytest.raises(UsageError, match=r"not a kit .it has .*, expected files and folders below its own"):
        unpacked(tmp_path / "kit.tar.gz", tmp_path / "work")
    assert not list((tmp_path / "work").iterdir())
