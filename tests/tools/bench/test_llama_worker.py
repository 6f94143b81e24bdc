"""llama.cpp as a method: what is missing is named, ids that a stream leaves out are found, a real model answers."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from specrt.engines.errors import SourceError, SpecrtError, UsageError
from specrt.engines.manifest import manifest_from_bundle
from specrt.tools.bench.bench import run_bench
from specrt.tools.bench.llama_worker import check_llama_cpp, merged
from specrt.tools.bench.methods import Worker, choose_methods, needed_bytes
from specrt.tools.bench.records import Settings
from specrt.tools.bench.tables import remarks
from specrt.tools.cli import main
from specrt.tools.lab.models import fetch
from tests.tools.bench.benches import MACHINE, PROMPTS

HAS_PACKAGE = importlib.util.find_spec("xllamacpp") is not None
needs_package = pytest.mark.skipif(not HAS_PACKAGE, reason="needs the package xllamacpp (the extra llama-cpp)")


def test_ids_within_a_character_come_with_its_end() -> None:
    """A stream that shows 1, 4 and 6 of 1 .. 7."""
    ids, arrivals = merged([1, 2, 3, 4, 5, 6, 7], [1, 4, 6], [[0.1, 1], [0.4, 1], [0.6, 1]], 0.9)
    assert ids == [1, 2, 3, 4, 5, 6, 7]
    assert arrivals == [[0.1, 1], [0.4, 3], [0.6, 2], [0.9, 1]]


def test_another_answer_to_the_same_question_is_no_whole() -> None:
    with pytest.raises(SpecrtError, match="returned other ids for the same request: id 9 after 1 ids"):
        merged([1, 2, 3], [1, 9], [[0.1, 1], [0.2, 1]], 0.2)


def test_a_missing_package_is_reported_with_the_command_before_anything_runs(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    run = CliRunner().invoke(main, ["bench", str(tiny_bundle), "--baseline", "llama.cpp"])
    assert run.exit_code == 2
    assert "pip install 'specrt[llama-cpp]'" in run.stderr and len(run.stderr.splitlines()) == 1


@needs_package
def test_the_gguf_file_is_the_bundles_source_or_the_one_that_is_named(tiny_bundle: Path, tmp_path: Path) -> None:
    manifest = manifest_from_bundle(tiny_bundle)
    with pytest.raises(UsageError, match=r"expected a \.gguf file; name one with --gguf"):
        check_llama_cpp(manifest, {})
    with pytest.raises(SourceError, match=r"none\.gguf: no such file"):
        check_llama_cpp(manifest, {"gguf": str(tmp_path / "none.gguf")})
    file = tmp_path / "a.GGUF"
    file.write_bytes(b"")
    assert check_llama_cpp(manifest, {"target": str(file)}) == file
    assert check_llama_cpp(manifest, {"target": "x", "gguf": str(file)}) == file


def test_the_memory_of_four_bits_is_less_than_that_of_fp32(tiny_bundle: Path) -> None:
    manifest = manifest_from_bundle(tiny_bundle)
    quantized, whole = (needed_bytes(manifest, choose_methods(name, manifest)) for name in ("llama.cpp", "eager"))
    assert quantized < whole


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        return fetch("smollm2-135m")
    except SpecrtError as error:
        pytest.skip(f"SmolLM2-135M cannot be fetched here: {error}")


def llama_worker(bundle: Path, gguf: Path) -> Worker:
    settings = {"library": "llama.cpp", "dtype": "gguf", "bundle": str(bundle), "threads": 1, "with_draft": False}
    sources = {"gguf": str(gguf)}
    return Worker(
        "llama.cpp", [sys.executable, "-m", "specrt.tools.bench.worker", json.dumps({**settings, "sources": sources})]
    )


@pytest.mark.slow
@pytest.mark.model
@needs_package
def test_a_real_model_answers_what_its_dequantized_weights_find_likely(tiny_bundle: Path, smollm2: Path) -> None:
    """Its kernels round activations, so ids may leave those of fp32; but each is one that fp32 finds likely there.

    The bundle only lends its context. The second prompt is answered with ids that stand for parts of characters.
    """
    import torch

    from specrt.exporter.sources.loading import load_model
    from specrt.exporter.sources.source import find_source

    source = find_source(str(smollm2))
    asked = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    prompts = [source.tokenizer(text)["input_ids"] for text in (asked, "Some emoji: 😀 🎉 😀 🎉 😀 🎉 😀")]
    model: Any = load_model(source, torch.float32).model
    with llama_worker(tiny_bundle, smollm2) as worker:
        assert "CPU" in worker.started["kernels"] and worker.started["gguf"] == smollm2.name
        for ids in prompts:
            reply = worker.ask(prompt_ids=ids, max_new_tokens=12, draft="none", k=0, ignore_eos=False)
            answered = torch.tensor(reply["token_ids"])
            with torch.no_grad():
                logits = model(torch.tensor([[*ids, *reply["token_ids"]]])).logits[0, len(ids) - 1 : -1]  # [new, V]
            ranks = (logits > logits.gather(1, answered[:, None])).sum(1)
            assert 6 <= len(answered) <= 12 and int(ranks.max()) < 10 and float(ranks.float().mean()) < 1
            assert sum(count for _, count in reply["arrivals"]) == len(reply["token_ids"])
            times = [at for at, _ in reply["arrivals"]]
            assert times == sorted(times) and 0 < times[0] < times[-1] <= reply["seconds"]
            assert reply["peak_bytes"] > smollm2.stat().st_size
        with pytest.raises(SpecrtError, match="exceeds the available context size"):
            worker.ask(prompt_ids=[1] * 600, max_new_tokens=4, draft="none", k=0, ignore_eos=False)


@pytest.mark.slow
@pytest.mark.model
@needs_package
def test_other_ids_are_reported_and_no_error(tiny_bundle: Path, smollm2: Path) -> None:
    methods = choose_methods("plain,llama.cpp", manifest_from_bundle(tiny_bundle))
    settings = Settings(4, 1, max_new_tokens=8, repeats=1, sources={"gguf": str(smollm2)})
    bench = run_bench(tiny_bundle, methods, PROMPTS, settings, MACHINE)
    row = bench.scores[1]
    assert (row.method, row.equal_prompts, bench.failed) == ("llama.cpp", 0, {})
    assert row.tokens_per_s > 0 and row.gap_ms["p50"] > 0 and 0 < row.first_token_ms < row.seconds * 1e3
    said = "\n".join(remarks(bench))
    assert "llama.cpp differs from plain at a, position" in said
    assert f"reads the quantized weights of {smollm2.name}, so its ids may differ" in said
