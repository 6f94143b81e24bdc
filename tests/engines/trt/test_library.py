"""Which TensorRT is taken: the row of a backend, and the versions that are refused."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specrt.engines.errors import BackendError
from specrt.engines.trt.library import LIBRARIES, check_version, deserialize, library_of, load_library
from specrt.engines.trt.network import make_logger


def test_tensorrt_rtx_is_here() -> None:
    module = load_library("tensorrt-rtx")
    assert module.__name__ == "tensorrt_rtx"
    assert hasattr(module, "Builder")


@pytest.mark.parametrize("version", ["10.15.0", "10.15.1.29", "11.0.0", "11.4.0.1"])
def test_tested_versions_of_tensorrt(version: str) -> None:
    check_version("tensorrt", version)


@pytest.mark.parametrize("version", ["8.6.1", "10.14.1.48", "11.5.0", "12.0"])
def test_tensorrt_too_old_or_too_new(version: str) -> None:
    with pytest.raises(BackendError, match=rf"tensorrt is {version}, expected 10\.15 to 11\.4 .*pip install"):
        check_version("tensorrt", version)


def test_a_version_is_checked_when_the_module_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorrt_rtx

    monkeypatch.setattr(tensorrt_rtx, "__version__", "1.0.0.1")
    with pytest.raises(BackendError, match=r"tensorrt_rtx is 1\.0\.0\.1, expected 1\.7 to 1\.7"):
        load_library("tensorrt-rtx")


def test_a_missing_library_is_said_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
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
    """The real library: it returns None and says why in its log only."""
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
