"""``specrt doctor``: what is installed here, what can be done with it, and the command for the rest."""

from __future__ import annotations

import importlib.metadata
import json

import pytest
from click.testing import CliRunner

from specrt.engines.gpu import Gpu
from specrt.engines.trt_library import LIBRARIES
from specrt.tools import doctor
from specrt.tools.cli import main
from specrt.tools.doctor import Ability, Diagnosis, examine

GPU = Gpu("NVIDIA L4", "8.9", "580.65.06", 24 << 30)


def abilities(diagnosis: Diagnosis) -> dict[str, Ability]:
    return {ability.name: ability for ability in diagnosis.abilities}


def test_versions_and_abilities_of_this_environment() -> None:
    diagnosis = examine()
    for name in ("numpy", "onnxruntime", "torch", "tensorrt-rtx"):
        assert diagnosis.versions[name] == importlib.metadata.version(name)
        assert name not in diagnosis.install
    assert "CPUExecutionProvider" in diagnosis.providers
    found = abilities(diagnosis)
    for name in ("export", "run with onnxruntime (CPU)", "build for tensorrt-rtx"):
        assert found[name] == Ability(name, True, "", None)


def test_what_is_missing_comes_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    diagnosis = examine()
    assert diagnosis.install["torch"] == "pip install 'specrt[export]'"
    found = abilities(diagnosis)
    assert [found[name].mend for name in ("export", "run with onnxruntime (CPU)")] == [
        "pip install 'specrt[export]'",
        "pip install 'specrt[cpu]'",
    ]
    for backend, library in LIBRARIES.items():
        ability = found[f"build for {backend}"]
        assert (ability.possible, ability.mend) == (False, library.install)
        assert ability.reason == f"{library.module} is not installed"


def test_tensorrt_builds_only_where_a_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "load_library", lambda backend: None)
    for gpus in ((), (GPU,)):
        monkeypatch.setattr(doctor, "find_gpus", lambda gpus=gpus: gpus)
        found = abilities(examine())
        assert found["build for tensorrt"].possible == bool(gpus)
        assert found["build for tensorrt-rtx"].possible


def test_the_command_prints_lines_or_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_gpus", lambda: (GPU,))
    text = CliRunner().invoke(main, ["doctor"])
    assert text.exit_code == 0, text.output
    assert "NVIDIA L4, compute capability 8.9, driver 580.65.06, 26 GB" in text.output
    data = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).output)
    assert data["gpus"][0]["compute_capability"] == "8.9"
    assert {ability["name"] for ability in data["abilities"]} >= {"export", "build for tensorrt-rtx"}
