"""Which TensorRT is taken: the row of a backend, and the versions that are refused."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from specrt.engines.contract import STANDARD_22_DIALECT, STANDARD_DIALECT
from specrt.engines.errors import BackendError
from specrt.engines.trt.library import (
    LIBRARIES,
    NEEDED,
    check_capability,
    check_features,
    deserialize,
    known_capabilities,
    library_of,
    load_library,
    portable_capabilities,
)
from specrt.engines.trt.network import make_logger
from tests.engines.trt.support import stub_versions


def test_tensorrt_rtx_is_here() -> None:
    module = load_library("tensorrt-rtx")
    assert module.__name__ == "tensorrt_rtx"
    assert hasattr(module, "Builder")


@pytest.mark.parametrize("version", ["10.15.1", "10.16.1", "11.0.0", "11.5.0", "12.0.0"])
def test_a_version_is_taken_by_what_it_has_not_by_its_number(version: str) -> None:
    check_features("tensorrt", stub_versions.module(version))


@pytest.mark.parametrize("version", ["10.3.0", "10.13.3"])
def test_a_version_without_kv_cache_updates_is_refused(version: str) -> None:
    message = rf"tensorrt {version} has no LayerType\.KV_CACHE_UPDATE, .*expected 10\.15 or later; pip install"
    with pytest.raises(BackendError, match=message):
        check_features("tensorrt", stub_versions.module(version))


@pytest.mark.parametrize("version", ["10.3.0", "10.13.3", "10.15.1", "11.0.0"])
def test_any_version_from_10_3_on_runs_the_dialect_of_10_3(version: str) -> None:
    check_features("tensorrt", stub_versions.module(version), STANDARD_22_DIALECT)


def test_a_version_that_is_too_old_for_a_bundle_names_the_dialect_that_it_runs() -> None:
    with pytest.raises(BackendError, match=r"the dialect standard needs; .* or export .*--tensorrt-version 10\.3$"):
        check_features("tensorrt", stub_versions.module("10.3.0"))


def test_a_version_before_10_3_is_refused_for_both() -> None:
    module = stub_versions.module("10.3.0")
    module.__version__, module.ExecutionContextAllocationStrategy = "8.6.1", SimpleNamespace()
    for dialect, oldest in ((STANDARD_DIALECT, "10.15"), (STANDARD_22_DIALECT, "10.3")):
        with pytest.raises(BackendError, match=f"expected {oldest} or later; pip install .*[^0-9]$"):
            check_features("tensorrt", module, dialect)


@pytest.mark.parametrize("name", NEEDED[STANDARD_DIALECT])
def test_each_name_is_needed_and_real(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library loses is noticed when it is loaded."""
    import tensorrt_rtx

    owner = name.partition(".")[0]
    assert load_library("tensorrt-rtx") is tensorrt_rtx
    monkeypatch.setattr(tensorrt_rtx, owner, SimpleNamespace())
    with pytest.raises(BackendError, match=rf"tensorrt_rtx .* has no {owner}\.\w+, .*expected 1\.7 or later"):
        load_library("tensorrt-rtx")


def test_gpus_that_tensorrt_rtx_has_code_for() -> None:
    """The whitelist is the library's own. Jetson (8.7, 11.0), Hopper (9.0) and data-centre Blackwell are not in it."""
    trt = load_library("tensorrt-rtx")
    assert tuple(known_capabilities(trt)) == ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")
    assert portable_capabilities(trt) == ("8.0", "8.6", "8.9", "12.0", "12.1")
    check_capability("tensorrt-rtx", trt, "8.9")
    for capability in ("8.7", "9.0", "10.0", "11.0"):
        with pytest.raises(BackendError, match=f"this GPU has {capability}; .*neither for Jetson nor for Hopper"):
            check_capability("tensorrt-rtx", trt, capability)


@pytest.mark.parametrize("version", ["10.16.1", "11.0.0"])
def test_tensorrt_builds_for_any_local_gpu(version: str) -> None:
    trt = stub_versions.module(version)
    assert known_capabilities(trt) == {}
    check_capability("tensorrt", trt, "9.0")


def test_a_missing_library_is_reported_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendError, match="tensorrt is not installed; pip install") as error:
        load_library("tensorrt")
    assert LIBRARIES["tensorrt"].install in str(error.value)


def test_a_library_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> ModuleType:
        raise ImportError("libnvinfer.so.11: cannot open shared object file")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("importlib.import_module", refuse)
    with pytest.raises(BackendError, match=r"tensorrt cannot be loaded \(libnvinfer"):
        load_library("tensorrt")


def test_other_backends_have_no_engines() -> None:
    with pytest.raises(BackendError, match="engines are for tensorrt-rtx, tensorrt"):
        library_of("onnxruntime")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "an empty file"),
        (b"not an engine" * 100, "incompatible serialization version"),
        (b"ftrt" + bytes(2000), "makes no engine of its 2004 bytes"),
    ],
)
def test_what_is_no_engine_is_refused_in_one_line(content: bytes, reason: str, tmp_path: Path) -> None:
    """The real library returns None and gives the reason only in its log."""
    trt = load_library("tensorrt-rtx")
    logger = make_logger(trt)
    path = tmp_path / "target.engine"
    path.write_bytes(content)
    with pytest.raises(BackendError, match=reason) as error:
        deserialize(trt, trt.Runtime(logger), path, "specrt build b --backend tensorrt-rtx --force", logger.errors)
    line = str(error.value)
    assert str(path) in line and "\n" not in line
    assert line.endswith("build it again with 'specrt build b --backend tensorrt-rtx --force'")


def test_an_engine_is_handed_on(tmp_path: Path) -> None:
    class Runtime:
        def deserialize_cuda_engine(self, plan: bytes) -> Any:
            return {"plan": bytes(plan)}

    path = tmp_path / "target.engine"
    path.write_bytes(b"plan")
    assert deserialize(sys, Runtime(), path, "") == {"plan": b"plan"}


def test_an_engine_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"not readable \(No such file or directory\); build it again with 'specrt"):
        deserialize(sys, None, tmp_path / "target.engine", "specrt build b")
