"""SmolLM2-135M, fetched and exported: its ids are transformers' greedy ids, plain and speculative."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import specrt
from specrt.engines.errors import SpecrtError
from specrt.engines.manifest import Manifest, manifest_from_bundle
from specrt.exporter.export import ExportOptions, export
from specrt.exporter.source import find_source
from specrt.runtime.runtime import Runtime
from specrt.tools.fetch import fetch
from specrt.tools.prompts import encode_prompts, load_prompts

pytestmark = pytest.mark.model

K = 8
NUM_TOKENS = 48
NUM_PROMPTS = 6
SELF_TOKENS = 220


@pytest.fixture(scope="module")
def gguf() -> Path:
    try:
        return fetch("smollm2-135m")
    except SpecrtError as error:
        pytest.skip(f"SmolLM2-135M cannot be fetched here: {error}")


@pytest.fixture(scope="module")
def bundle(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("smollm2") / "bundle"
    export(ExportOptions(str(gguf), output, draft="self", num_speculative_tokens=K))
    return output


@pytest.fixture(scope="module")
def manifest(bundle: Path) -> Manifest:
    return manifest_from_bundle(bundle)


@pytest.fixture(scope="module")
def runtime(bundle: Path) -> Runtime:
    return specrt.load(bundle)


@pytest.fixture(scope="module")
def prompts(bundle: Path, manifest: Manifest) -> list[list[int]]:
    return encode_prompts(load_prompts()[:NUM_PROMPTS], bundle, manifest)


@pytest.fixture(scope="module")
def eager(gguf: Path, prompts: list[list[int]], manifest: Manifest) -> list[list[int]]:
    """Greedy ids of transformers, one list for each prompt."""
    model = find_source(str(gguf)).load_model(torch.float32)
    answers = []
    for ids in prompts:
        prompt = torch.tensor([ids])
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=list(manifest.eos_token_ids),
        )
        answers.append(output[0, len(ids) :].tolist())
    return answers


def test_every_parameter_is_stored_once(manifest: Manifest) -> None:
    unique_parameters = 134_515_008  # the embedding is tied to the head
    assert manifest.target.weights_bytes == pytest.approx(unique_parameters * 4, rel=0.05)
    assert manifest.target.parity.argmax_agreement == 1.0
    assert manifest.target.parity.max_abs_error < 1e-3


@pytest.mark.parametrize("draft", ["none", "ngram", "model"])
def test_ids_equal_transformers(runtime: Runtime, prompts: list[list[int]], eager: list[list[int]], draft: str) -> None:
    """Each prompt with another K, so that all of 1..8 take their turn over the two drafts."""
    for index, (ids, expected) in enumerate(zip(prompts, eager, strict=True)):
        k = 0 if draft == "none" else 1 + (index + (4 if draft == "model" else 0)) % K
        result = runtime.generate(ids, max_new_tokens=NUM_TOKENS, num_speculative_tokens=k, draft=draft)
        assert result.token_ids == expected, f"prompt {index}, K = {k}"


def test_self_draft_accepts_everything_over_many_tokens(runtime: Runtime, prompts: list[list[int]]) -> None:
    stats = runtime.generate(
        prompts[0], max_new_tokens=SELF_TOKENS, num_speculative_tokens=5, draft="model", ignore_eos=True
    ).stats
    assert stats.completion_tokens == SELF_TOKENS
    assert stats.accepted == stats.drafted


def test_streamed_text_is_the_result(runtime: Runtime) -> None:
    stream = runtime.stream([{"role": "user", "content": "Say hello in French, with an emoji."}], max_new_tokens=32)
    pieces = list(stream)
    assert "".join(pieces) == stream.result.text == runtime.codec.decode(stream.result.token_ids)


def test_two_sequences_on_one_engine(runtime: Runtime, prompts: list[list[int]], eager: list[list[int]]) -> None:
    """Two open streams take turns and give what each gives alone."""
    streams = [runtime.stream(prompts[i], max_new_tokens=24, draft="model", num_speculative_tokens=3) for i in (0, 1)]
    iterators = [iter(stream) for stream in streams]
    while iterators:
        iterators = [iterator for iterator in iterators if next(iterator, None) is not None]
    assert [stream.result.token_ids for stream in streams] == [eager[0][:24], eager[1][:24]]
