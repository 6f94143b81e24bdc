"""``specrt doctor``: what is installed here, what can be done with it, and the command for the rest."""

from __future__ import annotations

import importlib.metadata
import json

import pytest
from click.testing import CliRunner

from specrt.engines.errors import BackendError
from specrt.engines.gpu.discovery import Gpu
from specrt.engines.trt.library import LIBRARIES
from specrt.tools import doctor
from specrt.tools.cli import main
from specrt.tools.doctor import Ability, Diagnosis, examine
from tests.engines.gpu.simulated_cuda import SimulatedCuda

GPU = Gpu("NVIDIA L4", "8.9", "580.65.06", 24 << 30)


def abilities(diagnosis: Diagnosis) -> dict[str, Ability]:
    return {ability.name: ability for ability in diagnosis.abilities}


def test_versions_and_abilities_of_this_environment() -> None:
    diagnosis = examine()
    for name in ("numpy", "onnxruntime", "torch", "tensorrt-rtx", "cuda-bindings"):
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
    assert [found[name].fix for name in ("export", "run with onnxruntime (CPU)")] == [
        "pip install 'specrt[export]'",
        "pip install 'specrt[cpu]'",
    ]
    for backend, library in LIBRARIES.items():
        ability = found[f"build for {backend}"]
        assert (ability.possible, ability.fix) == (False, library.install)
        assert ability.reason == f"{library.module} is not installed"


def test_tensorrt_builds_only_where_a_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "load_library", lambda backend: None)
    for gpus in ((), (GPU,)):
        monkeypatch.setattr(doctor, "find_gpus", lambda gpus=gpus: gpus)
        found = abilities(examine())
        assert found["build for tensorrt"].possible == bool(gpus)
        assert found["build for tensorrt-rtx"].possible


def test_running_on_a_gpu_needs_gpu_driver_and_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts become available one after the other."""
    runs = ("run with onnxruntime (CUDA)", "run with tensorrt-rtx")

    def found() -> list[tuple[bool, str, str | None]]:
        known = abilities(examine())
        return [(known[name].possible, known[name].reason, known[name].fix) for name in runs]

    monkeypatch.setattr(doctor, "find_gpus", lambda: ())
    assert found() == [(False, "no NVIDIA GPU is found", None)] * 2
    monkeypatch.setattr(doctor, "find_gpus", lambda: (GPU,))

    def fails() -> None:
        raise BackendError("device cuda: cudaSetDevice failed (no driver)")

    monkeypatch.setattr(doctor, "open_cuda", fails)
    assert found() == [(False, "cudaSetDevice failed (no driver)", None)] * 2
    monkeypatch.setattr(doctor, "open_cuda", SimulatedCuda)
    fix = "pip uninstall onnxruntime; pip install 'specrt[gpu]'"
    missing = "this onnxruntime has no CUDAExecutionProvider, only"
    assert (found()[0][0], found()[0][1].startswith(missing), found()[0][2]) == (False, True, fix)
    assert found()[1] == (True, "", None)

    def lacks() -> None:
        raise BackendError(f"device cuda: expected CUDA, got CPU; a library of cuDNN is missing; {fix}")

    monkeypatch.setattr("specrt.engines.ort.cuda.check_provider", lacks)
    assert found()[0] == (False, "expected CUDA, got CPU; a library of cuDNN is missing", fix)
    monkeypatch.setattr("specrt.engines.ort.cuda.check_provider", lambda: None)
    assert found()[0] == (True, "", None)


@pytest.mark.parametrize("capability", ["8.7", "9.0", "11.0"])
def test_rtx_runs_neither_on_jetson_nor_on_hopper(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu("a GPU", capability, "for CUDA 13.0", None)
    monkeypatch.setattr(doctor, "find_gpus", lambda: (gpu,))
    monkeypatch.setattr(doctor, "open_cuda", SimulatedCuda)
    found = abilities(examine())["run with tensorrt-rtx"]
    assert not found.possible
    assert found.reason.endswith(f"and this GPU has {capability}")
    assert found.fix == "TensorRT-RTX is neither for Jetson nor for Hopper, use --backend tensorrt there"


def test_the_command_prints_lines_or_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_gpus", lambda: (GPU,))
    text = CliRunner().invoke(main, ["doctor"])
    assert text.exit_code == 0, text.output
    assert "NVIDIA L4, compute capability 8.9, driver 580.65.06, 26 GB" in text.output
    data = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).output)
    assert data["gpus"][0]["compute_capability"] == "8.9"
    shared = Gpu("NVIDIA GB10", "12.1", "for CUDA 13.0", None)
    monkeypatch.setattr(doctor, "find_gpus", lambda: (shared,))
    text = CliRunner().invoke(main, ["doctor"])
    assert "NVIDIA GB10, compute capability 12.1, driver for CUDA 13.0, memory not known" in text.output
    assert {ability["name"] for ability in data["abilities"]} >= {"export", "build for tensorrt-rtx"}
