"""Which dialect a version of TensorRT takes, and which backends run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specrt.engines.contract import DIALECTS, ONNXRUNTIME_DIALECT, STANDARD_22_DIALECT, STANDARD_DIALECT
from specrt.engines.dialects import dialect_of_tensorrt, dialects_of, fits, oldest_version
from specrt.engines.errors import UsageError
from specrt.exporter.options import ExportOptions


@pytest.mark.parametrize("version", ["10.3", "10.3.0", "10.7", "10.13.3", "10.14"])
def test_versions_without_a_cache_update(version: str) -> None:
    assert dialect_of_tensorrt(version) == STANDARD_22_DIALECT


@pytest.mark.parametrize("version", ["10.15", "10.16.2", "11.0", "12.3"])
def test_versions_with_one(version: str) -> None:
    assert dialect_of_tensorrt(version) == STANDARD_DIALECT


@pytest.mark.parametrize(
    ("version", "message"),
    [("10.2", "expected 10.3 or later"), ("8.6.1", "expected 10.3 or later"), ("10", "expected numbers, as in 10.3")],
)
def test_other_versions_are_refused(version: str, message: str) -> None:
    with pytest.raises(UsageError, match=rf"^--tensorrt-version {version}: {message}"):
        dialect_of_tensorrt(version)


def test_a_backend_runs_its_dialects_and_no_others() -> None:
    assert (oldest_version(STANDARD_22_DIALECT), oldest_version(STANDARD_DIALECT)) == ("10.3", "10.15")
    assert all(dialects_of(backend)[0] == dialect for backend, dialect in DIALECTS.items())
    assert dialects_of("unknown") == ()
    assert fits("tensorrt", STANDARD_22_DIALECT) and not fits("onnxruntime", STANDARD_22_DIALECT)
    assert fits("unknown", ONNXRUNTIME_DIALECT) and not fits("unknown", "another")


def options(**changes: Any) -> ExportOptions:
    return ExportOptions("model", Path("b"), **{"backend": "tensorrt", "tensorrt_version": "10.3", **changes})


def test_an_export_for_a_version() -> None:
    assert options().dialect == STANDARD_22_DIALECT and options().dtype == "fp16"
    assert options().backends[0] == "tensorrt" and "onnxruntime" not in options().backends
    assert options(tensorrt_version=None).dialect == options(tensorrt_version="10.16").dialect == STANDARD_DIALECT
    assert options(quantize="int8").quantize == "int8"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "onnxruntime"}, "--tensorrt-version 10.3: it is for --backend tensorrt"),
        ({"backend": "tensorrt-rtx"}, "--tensorrt-version 10.3: it is for --backend tensorrt"),
        ({"quantize": "int4"}, "--quantize int4: expected none, int8"),
        ({"draft": "self:int4"}, "--draft self:int4: expected self, self:int8"),
        ({"tensorrt_version": "9.3"}, "--tensorrt-version 9.3: expected 10.3 or later"),
    ],
)
def test_what_an_export_for_a_version_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        options(**changes)
