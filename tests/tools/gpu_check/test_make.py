"""``make gpu-kit``: the kit's size and parts, and that it runs where only numpy and cuda-bindings are installed."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import tarfile
import venv
from pathlib import Path

import pytest

from specrt.engines.manifest import manifest_from_bundle
from specrt.engines.trt.record import check_build, record_from_bundle
from specrt.tools.gpu_check.forms import KIT_FORMS
from specrt.tools.gpu_check.kit import kit_in, unpacked
from specrt.tools.gpu_check.make import CONTEXTS, make_kit
from tests.conftest import has_nvidia_gpu

ROOT = Path(__file__).resolve().parents[3]
MOST_BYTES = 20_000_000


def bare_python(folder: Path) -> Path:
    """An interpreter with numpy, cuda-bindings and a copy of specrt without its exporter, and no other package."""
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in ("numpy", "cuda"):
        found = importlib.util.find_spec(name)
        assert found is not None and found.submodule_search_locations
        for place in map(Path, found.submodule_search_locations):
            for part in (place, *place.parent.glob(f"{name}.libs")):
                (site / part.name).symlink_to(part)
    shutil.copytree(ROOT / "specrt", site / "specrt")
    for package in ("engines", "runtime", "tools"):
        shutil.copytree(ROOT / package, site / "specrt" / package, ignore=shutil.ignore_patterns("__pycache__", "lab"))
    return folder / "bin" / "python"


@pytest.mark.slow
def test_a_kit_is_small_and_runs_outside_of_the_repository(tmp_path: Path) -> None:
    kit = make_kit(tmp_path / "gpu-kit.tar.gz")
    assert kit.stat().st_size < MOST_BYTES
    with tarfile.open(kit) as archive:
        assert not [member.name for member in archive if not (member.isfile() or member.isdir())]
    (tmp_path / "work").mkdir()
    parts = kit_in(unpacked(kit, tmp_path / "work"))
    assert parts.standard_22 is not None
    assert parts.standard is not None and parts.onnxruntime is not None and parts.layers is not None
    assert set(parts.attention) == {f"{form}-{context}" for form in KIT_FORMS for context in CONTEXTS}
    if importlib.util.find_spec("tensorrt_rtx") is not None:
        for bundle in (parts.standard, *parts.attention.values()):
            record, manifest = record_from_bundle(bundle, "tensorrt-rtx"), manifest_from_bundle(bundle)
            check_build(bundle, manifest, record, record.builder_version, "8.9")
        assert {"verify", "prefill", "decode"} == set(record.engines["target"].profiles)
    python = bare_python(tmp_path / "bare")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(
        [str(python), "-m", "specrt.tools.gpu_check", str(kit), "-o", "figures.json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=elsewhere,
        env={"PATH": os.defpath, "HOME": str(tmp_path)},
    )
    assert done.stderr == ""
    outcomes = json.loads((elsewhere / "figures.json").read_text())["outcomes"]
    assert len(outcomes) == 10
    assert (elsewhere / "figures.md").is_file()
    if not has_nvidia_gpu():
        assert done.returncode == 9
        assert {outcome["verdict"] for outcome in outcomes} == {"skipped"}
        assert all(outcome["reason"] for outcome in outcomes)


def test_the_bare_interpreter_has_what_the_check_needs_and_no_more(tmp_path: Path) -> None:
    """The control of the test above."""
    code = "import importlib.util as u; print([n for n in NAMES if u.find_spec(n)])"
    names = ["numpy", "cuda.bindings", "specrt.tools.gpu_check", "torch", "onnxruntime", "click", "specrt.exporter"]
    python = bare_python(tmp_path / "bare")
    command = [str(python), "-c", code.replace("NAMES", repr(names))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env={"PATH": os.defpath})
    assert done.stdout.strip() == str(names[:3])
