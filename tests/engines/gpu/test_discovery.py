"""GPUs from CUDA's driver, and without cuda-bindings from what ``nvidia-smi`` prints."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from specrt.engines.gpu.discovery import Gpu, find_gpus, parse_gpus

LISTING = "NVIDIA GeForce RTX 4090, 8.9, 580.65.06, 24564\nNVIDIA H200, 9.0, 580.65.06, 143771\n"


def test_gpus_of_a_listing() -> None:
    assert parse_gpus(LISTING) == (
        Gpu("NVIDIA GeForce RTX 4090", "8.9", "580.65.06", 24564 << 20),
        Gpu("NVIDIA H200", "9.0", "580.65.06", 143771 << 20),
    )


SHARED = "Orin (nvgpu), 8.7, 540.4.0, [N/A]\nNVIDIA GB10, 12.1, 580.126.09, [N/A]\n"


def test_gpus_that_share_the_hosts_memory_are_there() -> None:
    assert parse_gpus(SHARED) == (
        Gpu("Orin (nvgpu)", "8.7", "540.4.0", None),
        Gpu("NVIDIA GB10", "12.1", "580.126.09", None),
    )


class Driver:
    """Stands for ``cuda.bindings.driver``: (name, capability, memory) of each device, in CUDA's order."""

    def __init__(self, gpus: list[tuple[str, tuple[int, int], int]], init: str = "CUDA_SUCCESS") -> None:
        from cuda.bindings import driver

        self.CUresult, self.CUdevice_attribute = driver.CUresult, driver.CUdevice_attribute
        self._gpus, self._init = gpus, init
        self._minor = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR

    def cuInit(self, flags: int) -> tuple[Any]:
        return (getattr(self.CUresult, self._init),)

    def cuDriverGetVersion(self) -> tuple[Any, int]:
        return self.CUresult.CUDA_SUCCESS, 12090

    def cuDeviceGetCount(self) -> tuple[Any, int]:
        return self.CUresult.CUDA_SUCCESS, len(self._gpus)

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, int]:
        return self.CUresult.CUDA_SUCCESS, ordinal

    def cuDeviceGetName(self, length: int, device: int) -> tuple[Any, bytes]:
        return self.CUresult.CUDA_SUCCESS, self._gpus[device][0].encode().ljust(length, b"\0")

    def cuDeviceGetAttribute(self, attribute: Any, device: int) -> tuple[Any, int]:
        return self.CUresult.CUDA_SUCCESS, self._gpus[device][1][attribute == self._minor]

    def cuDeviceTotalMem(self, device: int) -> tuple[Any, int]:
        return self.CUresult.CUDA_SUCCESS, self._gpus[device][2]


def test_cuda_is_asked_first_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its device 0 is the one that runs; ``nvidia-smi`` goes by PCI bus."""
    _install(tmp_path, monkeypatch, f"printf '{LISTING}'")
    monkeypatch.setattr("cuda.bindings.driver", Driver([("NVIDIA H200", (9, 0), 1 << 37), ("Thor", (11, 0), 1 << 36)]))
    assert find_gpus() == (
        Gpu("NVIDIA H200", "9.0", "for CUDA 12.9", 1 << 37),
        Gpu("Thor", "11.0", "for CUDA 12.9", 1 << 36),
    )


def test_a_driver_that_cannot_start_shows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuda.bindings.driver", Driver([], "CUDA_ERROR_NO_DEVICE"))
    assert find_gpus() == ()


def test_the_stub_of_the_driver_invents_nothing() -> None:
    import inspect

    from cuda.bindings import driver

    for name in (name for name in vars(Driver) if name.startswith("cu")):
        parameters = [p for p in inspect.signature(getattr(Driver, name)).parameters if p != "self"]
        assert len(inspect.signature(getattr(driver, name)).parameters) == len(parameters), name


@pytest.mark.parametrize("text", ["", "No devices were found\n", "a, b, c, [N/A]\n"])
def test_nothing_from_other_lines(text: str) -> None:
    assert parse_gpus(text) == ()


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")


@pytest.fixture
def _without_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("cuda.bindings.driver", raising=False)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)


@pytest.mark.usefixtures("_without_bindings")
def test_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, monkeypatch, f"printf '{LISTING}'")
    assert [gpu.compute_capability for gpu in find_gpus()] == ["8.9", "9.0"]


@pytest.mark.usefixtures("_without_bindings")
def test_a_listing_that_fails_shows_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, monkeypatch, "exit 9")
    assert find_gpus() == ()


@pytest.mark.usefixtures("_without_bindings")
def test_no_driver_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_gpus() == ()
