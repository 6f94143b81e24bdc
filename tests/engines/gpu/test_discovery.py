"""GPUs from what ``nvidia-smi`` prints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specrt.engines.gpu.discovery import Gpu, find_gpus, parse_gpus

LISTING = "NVIDIA GeForce RTX 4090, 8.9, 580.65.06, 24564\nNVIDIA H200, 9.0, 580.65.06, 143771\n"


def test_gpus_of_a_listing() -> None:
    assert parse_gpus(LISTING) == (
        Gpu("NVIDIA GeForce RTX 4090", "8.9", "580.65.06", 24564 << 20),
        Gpu("NVIDIA H200", "9.0", "580.65.06", 143771 << 20),
    )


@pytest.mark.parametrize("text", ["", "No devices were found\n", "a, b, c, [N/A]\n"])
def test_nothing_from_other_lines(text: str) -> None:
    assert parse_gpus(text) == ()


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")


def test_the_driver_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, monkeypatch, f"printf '{LISTING}'")
    assert [gpu.compute_capability for gpu in find_gpus()] == ["8.9", "9.0"]


def test_a_driver_that_fails_shows_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, monkeypatch, "exit 9")
    assert find_gpus() == ()


def test_no_driver_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_gpus() == ()
