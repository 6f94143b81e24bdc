"""Engines that do not fit, are damaged, or are too small: one line each, before the library reads them."""

from __future__ import annotations

import gc
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import specrt
from specrt.engines.contract import ROWS, WIDTH
from specrt.engines.errors import BackendError, BundleError, SpecrtError, UsageError
from specrt.engines.storage.integrity import sha256_of
from specrt.engines.trt import engine
from specrt.engines.trt.profiles import PREFILL, VERIFY, Profile
from specrt.engines.trt.record import (
    RECORD_NAME,
    BuildRecord,
    check_build,
    engines_folder,
    record_from_bundle,
    record_text,
    remember_build,
)
from specrt.engines.trt.runtime_cache import RUNTIME_CACHE_NAME
from tests.engines.gpu.simulated_gpu import SimulatedGpu
from tests.engines.trt import simulated_trt
from tests.engines.trt.support.library_types import DataType

BACKEND = "tensorrt-rtx"


@pytest.fixture
def simulated(tiny_tensorrt_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
    return SimulatedGpu(Path(shutil.copytree(tiny_tensorrt_bundle, tmp_path / "bundle")), BACKEND, monkeypatch)


def rewrite(simulated: SimulatedGpu, **changes: Any) -> None:
    """Change the record of the build."""
    record: BuildRecord = replace(record_from_bundle(simulated.bundle, BACKEND), **changes)
    (engines_folder(simulated.bundle, BACKEND) / RECORD_NAME).write_text(record_text(record))
    remember_build(record)


def refused(simulated: SimulatedGpu, kind: type[SpecrtError]) -> str:
    with pytest.raises(kind) as caught:
        specrt.load(simulated.bundle, backend=BACKEND).open_slot("none")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_record_is_checked_before_anything_is_loaded(simulated: SimulatedGpu) -> None:
    simulated.cuda.compute_capability = "7.5"
    assert "engines are for compute capability 8.9, this GPU has 7.5; build them again with" in refused(
        simulated, BackendError
    )
    simulated.cuda.compute_capability = "8.9"
    simulated.library.__version__ = "1.7.9"
    assert "engines are for tensorrt_rtx 1.7.1, found 1.7.9" in refused(simulated, BackendError)
    simulated.library.__version__ = "1.7.1"
    engines = record_from_bundle(simulated.bundle, BACKEND).engines
    for profile, dim, least in ((VERIFY, ROWS, 3), (PREFILL, WIDTH, 31)):
        profiles: dict[str, Profile] = {
            **engines["target"].profiles,
            profile: {WIDTH: (1, 1, least), ROWS: (1, 1, least)},
        }
        rewrite(simulated, engines={**engines, "target": replace(engines["target"], profiles=profiles)})
        assert f"profile {profile} is built for {least} {dim}" in refused(simulated, BackendError)
    assert simulated.library.engines == []


def test_an_engine_that_the_library_does_not_take_is_never_used(simulated: SimulatedGpu) -> None:
    path = engines_folder(simulated.bundle, BACKEND) / "target.engine"
    path.write_bytes(b"no engine at all")
    assert "bytes, expected" in refused(simulated, BundleError)
    engines = record_from_bundle(simulated.bundle, BACKEND).engines
    entry = replace(engines["target"], num_bytes=path.stat().st_size, sha256=sha256_of(path))
    rewrite(simulated, engines={**engines, "target": entry})
    assert "makes no engine of its 16 bytes (the engine is corrupt), expected" in refused(simulated, BackendError)


def test_a_bundle_without_engines_names_the_command_that_builds_them(simulated: SimulatedGpu) -> None:
    shutil.rmtree(engines_folder(simulated.bundle, BACKEND))
    assert f"specrt build {simulated.bundle} --backend {BACKEND}" in refused(simulated, BackendError)


def test_engines_of_another_machine_are_announced(
    simulated: SimulatedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path / "another"))
    with pytest.warns(UserWarning, match="native code that this machine did not build"):
        specrt.load(simulated.bundle, backend=BACKEND).close()


def test_an_engine_is_compared_with_the_contract(simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_trt.ICudaEngine, "get_tensor_dtype", lambda self, name: DataType.FLOAT)
    assert "differs from the contract at input_ids: got (True, 'float32', (1, -1), True, None), expected" in refused(
        simulated, BundleError
    )


def test_outputs_must_be_in_the_memory_of_their_inputs(
    simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that copies its cache would be bound to one address, and give wrong results."""
    monkeypatch.setattr(simulated_trt.ICudaEngine, "get_aliased_input_tensor", lambda self, name: None)
    said = refused(simulated, BundleError)
    assert "differs from the contract at present" in said and "(input, dtype, shape, on the GPU, alias)" in said


def test_a_gpu_that_rtx_has_no_code_for_is_named_before_the_record(simulated: SimulatedGpu) -> None:
    simulated.cuda.compute_capability = "9.0"
    said = refused(simulated, BackendError)
    assert "has compute capability 7.5, 8.0, 8.6, 8.9, 12.0, 12.1 and this GPU has 9.0" in said
    assert said.endswith("TensorRT-RTX is neither for Jetson nor for Hopper, use --backend tensorrt there")


def test_there_is_no_tensorrt_on_the_cpu(simulated: SimulatedGpu) -> None:
    with pytest.raises(BackendError, match="device cpu: backend tensorrt-rtx runs on a GPU only"):
        specrt.load(simulated.bundle, device="cpu")
    with pytest.raises(BackendError, match="device cpu: backend tensorrt-rtx runs on a GPU only"):
        specrt.load(simulated.bundle, draft_device="cpu")
    with pytest.raises(UsageError, match="device: got 'tpu', expected one of cpu, cuda"):
        specrt.load(simulated.bundle, device="tpu")


def test_runtime_cache_is_kept_next_to_the_engines(simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    path = engines_folder(simulated.bundle, BACKEND) / RUNTIME_CACHE_NAME

    def generate() -> None:
        with specrt.load(simulated.bundle, backend=BACKEND) as runtime:
            runtime.generate("The quick", max_new_tokens=3)
        del runtime
        gc.collect()  # as a new process: no engine of the build is in use

    generate()
    entries = json.loads(path.read_bytes())
    assert any("target/model.onnx" in entry for entry in entries)
    before = path.stat().st_mtime_ns
    generate()
    assert path.stat().st_mtime_ns == before, "nothing new, nothing written"
    path.write_bytes(b"of another library")
    generate()
    assert json.loads(path.read_bytes()) == entries

    def fails(*_: Any) -> None:
        raise OSError("read-only")

    path.unlink()
    monkeypatch.setattr("specrt.engines.trt.runtime_cache.os.replace", fails)
    with pytest.warns(UserWarning, match=r"runtime.cache: cannot be written \(read-only\)"):
        generate()
    assert [file.name for file in path.parent.iterdir() if file.name.startswith(".")] == []


def test_a_build_is_checked_once_for_all_its_engines(simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = []

    def counted(*arguments: Any) -> list[str]:
        checks.append(1)
        return check_build(*arguments)

    monkeypatch.setattr(engine, "check_build", counted)
    with specrt.load(simulated.bundle, backend=BACKEND) as runtime:
        runtime.generate("The quick", max_new_tokens=3)
    assert len(simulated.library.engines) > 2
    assert len(checks) == 1
