"""``verify --source``, and that an export depends on its source alone."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specrt.engines.errors import SourceError, UsageError
from specrt.engines.manifest import Manifest, manifest_from_bundle
from specrt.engines.progress import SILENT
from specrt.exporter.export import export
from specrt.exporter.options import ExportOptions
from specrt.tools.verify.checks import Check
from specrt.tools.verify.source_check import check_sources, roles_compared
from tests.exporter.sources.folders import Tensors, change_weights
from tests.tools.commands import invoke, one_error_line


@pytest.fixture(scope="module")
def manifest(tiny_bundle: Path) -> Manifest:
    return manifest_from_bundle(tiny_bundle)


def check(manifest: Manifest, source: Path) -> Check:
    (found,) = check_sources(manifest, str(source), None, SILENT)
    return found


def rounded(tensors: Tensors) -> Tensors:
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def one_value(tensors: Tensors) -> Tensors:
    tensors["model.norm.weight"][3] += 1e-6
    return tensors


def test_the_model_of_the_export_has_its_fingerprint(tiny_bundle: Path, manifest: Manifest) -> None:
    found = check(manifest, tiny_bundle.parent / "model")
    assert found.passed and found.figures["fingerprint"] == manifest.target.fingerprint
    assert roles_compared([found]) == ("target",) and roles_compared([]) == ()


@pytest.mark.parametrize("change", [rounded, one_value])
def test_other_weights_fail(
    change: Callable[[Tensors], Tensors], tiny_bundle: Path, manifest: Manifest, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_bundle.parent / "model", tmp_path / "m"))
    assert check(manifest, folder).passed
    change_weights(folder, change)
    found = check(manifest, folder)
    assert not found.passed and "other weights" in found.found


def test_a_source_that_cannot_be_compared_is_one_line(tiny_bundle: Path, manifest: Manifest) -> None:
    assert "draft self is no model" in one_error_line(invoke("verify", tiny_bundle, "--draft-source", "x"))
    with pytest.raises(SourceError, match="no such file or folder"):
        check(manifest, tiny_bundle / "nothing")


def test_without_the_export_extra_the_error_has_the_install_command(
    manifest: Manifest, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    with pytest.raises(UsageError, match=r"torch is needed .* pip install 'specrt\[export\]'"):
        check(manifest, tiny_bundle.parent / "model")
    assert "torch" in sys.modules  # by this test's imports, not by the check's


def test_an_export_under_another_seed_is_the_same_to_the_byte(tiny_bundle: Path, tmp_path: Path) -> None:
    torch.manual_seed(12345)
    export(ExportOptions(str(tiny_bundle.parent / "model"), tmp_path / "b", draft="self", num_speculative_tokens=4))
    first = sorted(path for path in (tiny_bundle / "target").rglob("*") if path.is_file())
    assert len(first) >= 3
    for path in first:
        assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tiny_bundle)).read_bytes(), path.name


def test_an_export_without_one_tensor_is_refused_and_leaves_nothing(tiny_bundle: Path, tmp_path: Path) -> None:
    """The control of the above: before the check this gave another model under each seed."""
    folder = Path(shutil.copytree(tiny_bundle.parent / "model", tmp_path / "m"))
    change_weights(folder, lambda tensors: {k: t for k, t in tensors.items() if k != "lm_head.weight"})
    result = invoke("export", folder, "-o", tmp_path / "b")
    assert result.exit_code == 3
    assert "lm_head.weight" in result.stderr.splitlines()[-1] and "specrt: error:" in result.stderr.splitlines()[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]
