"""The simulated GPU, and a kit for it of bundles that other tests export too."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from specrt.engines.trt.library import LIBRARIES
from specrt.tools.gpu_check.experiments import attention, places, rtx, speed
from tests.engines.gpu.simulated_gpu import SimulatedGpu


@pytest.fixture(params=["tensorrt-rtx", pytest.param("tensorrt", marks=pytest.mark.slow)])
def simulated(
    tiny_tensorrt_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> SimulatedGpu:
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
    for module in (attention, places, speed):
        monkeypatch.setattr(module, "LIBRARIES", {request.param: LIBRARIES[request.param]})
    bundle = Path(shutil.copytree(tiny_tensorrt_bundle, tmp_path / "bundle"))
    made = SimulatedGpu(bundle, request.param, monkeypatch)
    for module in (places, rtx):
        monkeypatch.setattr(module, "load_library", lambda backend, dialect="": made.library)
    return made
