"""ONNX Runtime GenAI as a method: what is missing is named, and its own builder's model of the target gives its ids."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from specrt.engines.errors import SpecrtError, UsageError
from specrt.engines.manifest import Manifest, manifest_from_bundle
from specrt.tools.bench import genai_model
from specrt.tools.bench.bench import run_bench
from specrt.tools.bench.genai_worker import answer, search_options
from specrt.tools.bench.methods import choose_methods
from specrt.tools.bench.records import Settings
from specrt.tools.bench.tables import remarks
from specrt.tools.cli import main
from tests.progress import KeptProgress
from tests.tools.bench.benches import MACHINE, PROMPTS

HAS_PACKAGE = importlib.util.find_spec("onnxruntime_genai") is not None
needs_package = pytest.mark.skipif(not HAS_PACKAGE, reason="needs the package onnxruntime-genai (the extra genai)")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "genai"


def pretend_installed(monkeypatch: pytest.MonkeyPatch, onnxruntime: str) -> None:
    """The package's metadata alone, which is read before the package is imported."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find("json" if name == "onnxruntime_genai" else name))
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["numpy>=1.21", f"onnxruntime{onnxruntime}"])
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.18.0")


def test_a_missing_package_is_one_line_before_anything_runs(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    run = CliRunner().invoke(main, ["bench", str(tiny_bundle), "--baseline", "genai"])
    assert run.exit_code == 2
    assert "pip install 'specrt[genai]'" in run.stderr and len(run.stderr.splitlines()) == 1


def test_an_onnxruntime_that_is_too_old_for_the_package_is_named(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = manifest_from_bundle(tiny_bundle)
    pretend_installed(monkeypatch, ">=99")
    with pytest.raises(UsageError, match=r"got onnxruntime [\d.]+, onnxruntime-genai 0\.18\.0 expects >=99"):
        genai_model.check_genai(manifest)
    pretend_installed(monkeypatch, ">=1.0")
    assert genai_model.check_genai(manifest) == "fp32"


def quantized(manifest: Manifest, quantization: str) -> Manifest:
    return dataclasses.replace(manifest, target=dataclasses.replace(manifest.target, quantization=quantization))


def test_the_precision_is_that_of_the_target(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = manifest_from_bundle(tiny_bundle)
    pretend_installed(monkeypatch, ">=1.0")
    assert genai_model.check_genai(quantized(manifest, "int4")) == "int4"
    with pytest.raises(UsageError, match="got a target in float32 with quantization w8a8, expected float32 with none"):
        genai_model.check_genai(quantized(manifest, "w8a8"))


def test_options_of_a_request() -> None:
    request = {"prompt_ids": [1, 2, 3], "max_new_tokens": 5, "ignore_eos": False}
    assert search_options(request) == {"max_length": 8, "min_length": 0, "do_sample": False}
    sampled = search_options({**request, "ignore_eos": True, "temperature": 0.7, "seed": 4})
    assert (sampled["min_length"], sampled["temperature"], sampled["top_k"], sampled["random_seed"]) == (8, 0.7, 0, 4)


def test_an_answer_has_a_time_for_each_id() -> None:
    class Generator:
        """As GenAI's: the prompt goes in once, then an id a step."""

        def __init__(self) -> None:
            self.left = [7, 8, 9]

        def append_tokens(self, ids: Any) -> None:
            assert ids.tolist() == [[1, 2]]

        def is_done(self) -> bool:
            return not self.left

        def generate_next_token(self) -> None:
            self.now = self.left.pop(0)

        def get_next_tokens(self) -> list[int]:
            return [self.now]

    found = answer(Generator(), [1, 2])
    assert found["token_ids"] == [7, 8, 9] and [count for _, count in found["arrivals"]] == [1, 1, 1]
    assert sorted(found["arrivals"]) == found["arrivals"] and found["arrivals"][-1][0] <= found["seconds"]


def test_a_builder_that_fails_is_one_line_and_leaves_nothing(
    tiny_bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_installed(monkeypatch, ">=1.0")
    with pytest.raises(SpecrtError, match=r"genai: the target cannot be saved .*no such.*; leave genai out"):
        genai_model.genai_model(tiny_bundle, manifest_from_bundle(tiny_bundle), {"target": "./nowhere"})
    assert not cache.exists() or not list(cache.iterdir())


@needs_package
def test_its_ids_are_those_of_plain_decoding(tiny_bundle: Path, cache: Path) -> None:
    """fp32 both. The folder is built once, and holds nothing of the way it was built."""
    manifest, progress = manifest_from_bundle(tiny_bundle), KeptProgress()
    folder = genai_model.genai_model(tiny_bundle, manifest, {}, progress)
    assert (
        len(progress.notes) == 1
        and folder.parent == cache
        and not {"torch", "scratch"} & {p.name for p in folder.iterdir()}
    )
    assert genai_model.genai_model(tiny_bundle, manifest, {}, progress) == folder and len(progress.notes) == 1
    settings = Settings(4, 1, max_new_tokens=24, repeats=1)
    bench = run_bench(tiny_bundle, choose_methods("plain,genai", manifest), PROMPTS, settings, MACHINE)
    row = bench.scores[1]
    assert (row.method, row.equal_prompts, bench.failed) == ("genai", 2, {})
    assert row.tokens_per_s > 0 and row.gap_ms["p50"] > 0
    assert any(line.startswith("genai is onnxruntime-genai") for line in remarks(bench))
