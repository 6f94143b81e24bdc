"""What ``export`` refuses, and that nothing is left when it fails or is interrupted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import MambaConfig

from specrt.engines.errors import (
    PairError,
    ResourceError,
    SourceError,
    SpecrtError,
    UnsupportedModelError,
    UsageError,
)
from specrt.engines.manifest import manifest_from_bundle
from specrt.exporter.export import export
from specrt.exporter.options import ExportOptions
from tests.exporter.tiny_pair import export_tiny
from tests.progress import interrupted_at
from tests.tiny import save_tiny_model


def _other_family(models: dict[str, Path], folder: Path) -> Path:
    """The draft with two of its tokens swapped."""
    shutil.copytree(models["draft"], folder)
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    vocab = data["model"]["vocab"]
    first, second = (token for token, index in vocab.items() if index in (40, 41))
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(data))
    Tokenizer.from_file(str(path))
    return folder


def _broken(case: str, models: dict[str, Path], root: Path) -> tuple[dict[str, Path], dict[str, Any]]:
    """(models, options) of an export that must be refused."""
    if case == "no such path":
        return {"target": root / "nowhere.gguf"}, {}
    if case == "folder without weights":
        shutil.copytree(models["target"], root / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
        return {"target": root / "bare"}, {}
    if case == "folder without config":
        (root / "empty").mkdir()
        return {"target": root / "empty"}, {}
    if case == "truncated weights":
        shutil.copytree(models["target"], root / "cut")
        weights = root / "cut" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
        return {"target": root / "cut"}, {}
    if case == "not a GGUF file":
        (root / "x.gguf").write_bytes(b"GGUF but not really")
        return {"target": root / "x.gguf"}, {}
    if case == "recurrent state":
        config = MambaConfig(vocab_size=320, hidden_size=64, num_hidden_layers=2)
        return {"target": save_tiny_model(root / "mamba", config)}, {}
    if case == "draft of another family":
        return models, {"draft": str(_other_family(models, root / "other"))}
    options: dict[str, dict[str, Any]] = {
        "K of 0": {"num_speculative_tokens": 0},
        "context beyond the model's": {"max_seq_len": 100_000},
        "bf16 on the CPU": {"dtype": "bf16"},
        "fp32 with TensorRT": {"dtype": "fp32", "backend": "tensorrt-rtx"},
        "w8a8 with TensorRT": {"quantize": "w8a8", "backend": "tensorrt-rtx"},
        "w8a8 draft with TensorRT": {"draft": "self:w8a8", "backend": "tensorrt"},
        "unknown backend": {"backend": "nothing"},
        "revision of a local path": {"revision": "main"},
    }
    return models, options[case]


REFUSALS: dict[str, type[SpecrtError]] = {
    "no such path": SourceError,
    "folder without weights": SourceError,
    "folder without config": SourceError,
    "truncated weights": SourceError,
    "not a GGUF file": SourceError,
    "revision of a local path": SourceError,
    "recurrent state": UnsupportedModelError,
    "draft of another family": PairError,
    "K of 0": UsageError,
    "context beyond the model's": UsageError,
    "bf16 on the CPU": UsageError,
    "fp32 with TensorRT": UsageError,
    "w8a8 with TensorRT": UsageError,
    "w8a8 draft with TensorRT": UsageError,
    "unknown backend": UsageError,
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_in_one_line_and_nothing_written(case: str, models: dict[str, Path], tmp_path: Path) -> None:
    inputs, options = _broken(case, models, tmp_path)
    place = tmp_path / "out"
    place.mkdir()
    with pytest.raises(REFUSALS[case]) as error:
        export_tiny(inputs, place / "bundle", **options)
    assert "\n" not in str(error.value)
    assert list(place.iterdir()) == []


def test_existing_bundle_is_kept_without_force_and_replaced_with_it(
    models: dict[str, Path], pair: Path, tmp_path: Path
) -> None:
    output = Path(shutil.copytree(pair, tmp_path / "bundle"))
    before = (output / "bundle.json").read_text()
    with pytest.raises(UsageError, match="--force"):
        export_tiny(models, output)
    assert (output / "bundle.json").read_text() == before
    export_tiny(models, output, force=True, num_speculative_tokens=3)
    assert manifest_from_bundle(output).num_speculative_tokens == 3
    assert list(tmp_path.iterdir()) == [output]


def test_force_does_not_delete_what_is_not_a_bundle(models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("dear")
    with pytest.raises(UsageError, match="not a bundle"):
        export_tiny(models, tmp_path, force=True)
    assert (tmp_path / "letters.txt").read_text() == "dear"


def test_too_little_disk_is_an_error_before_any_work(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    with pytest.raises(ResourceError, match="GB are free"):
        export_tiny(models, tmp_path / "out" / "bundle")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "step",
    [
        "target: loading weights",
        "target: tracing",
        pytest.param("target: writing", marks=pytest.mark.slow),
        pytest.param("target: comparing with the torch model", marks=pytest.mark.slow),
        "hashing",
    ],
)
def test_interrupted_export_leaves_nothing(step: str, models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        export(ExportOptions(str(models["target"]), tmp_path / "bundle"), interrupted_at(step))
    assert list(tmp_path.iterdir()) == []


def test_interrupted_command_exits_with_130_and_leaves_nothing(models: dict[str, Path], tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "specrt.tools.cli",
        "export",
        str(models["target"]),
        "-o",
        str(tmp_path / "bundle"),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None and not list(tmp_path.glob(".bundle.partial-*/[!.]*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
