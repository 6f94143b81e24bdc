"""SmolLM2-135M, fetched and exported: for every draft transformers' greedy ids, and with a seed the same text.

``make test`` runs one short test; the others show at full size what tests of tiny models show.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import specrt
from specrt.engines.contract import LOGITS
from specrt.engines.errors import SpecrtError
from specrt.engines.interface import Array
from specrt.engines.manifest import Manifest, manifest_from_bundle
from specrt.exporter.export import export
from specrt.exporter.options import ExportOptions
from specrt.exporter.sources.loading import load_model
from specrt.exporter.sources.source import find_source
from specrt.runtime.runtime import Runtime
from specrt.runtime.target import Target
from specrt.tools.lab.models import fetch
from specrt.tools.prompting.prompts import encode_prompts, load_prompts
from specrt.tools.verify.checks import Subject, check_bits, check_reference

pytestmark = pytest.mark.model

K = 8
NUM_TOKENS = 32
NUM_PROMPTS = 5
SELF_TOKENS = 220
WAYS: list[dict[str, Any]] = [
    {"num_speculative_tokens": 0},
    {"num_speculative_tokens": 3, "draft": "model"},
    {"num_speculative_tokens": 3, "draft": "ngram"},
]
SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "filters": {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "a large nucleus": {"temperature": 2.0, "top_p": 0.95},  # more ids than the filter sorts
}


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


def eager_ids(gguf: Path, prompts: list[list[int]], eos: Sequence[int], num_tokens: int) -> list[list[int]]:
    """Greedy ids of transformers, one list for each prompt."""
    model = load_model(find_source(str(gguf)), torch.float32).model
    answers = []
    for ids in prompts:
        prompt = torch.tensor([ids])
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=list(eos),
        )
        answers.append(output[0, len(ids) :].tolist())
    return answers


@pytest.fixture(scope="module")
def eager(gguf: Path, prompts: list[list[int]], manifest: Manifest) -> list[list[int]]:
    return eager_ids(gguf, prompts, manifest.eos_token_ids, NUM_TOKENS)


def test_export_and_generate(gguf: Path, runtime: Runtime, prompts: list[list[int]]) -> None:
    """Each parameter is stored once, and the ids are those of transformers with and without a draft."""
    manifest = runtime.manifest
    unique_parameters = 134_515_008  # the embedding is tied to the head
    assert manifest.target.weights_bytes == pytest.approx(unique_parameters * 4, rel=0.05)
    assert manifest.target.parity.argmax_agreement == 1.0
    assert manifest.target.parity.max_abs_error < 1e-3
    (expected,) = eager_ids(gguf, prompts[:1], manifest.eos_token_ids, 16)
    for draft, k in (("none", 0), ("ngram", 3), ("model", 5)):
        result = runtime.generate(prompts[0], max_new_tokens=16, num_speculative_tokens=k, draft=draft)
        assert result.token_ids == expected, draft


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["none", "ngram", "model", "auto"])
def test_ids_equal_transformers(runtime: Runtime, prompts: list[list[int]], eager: list[list[int]], draft: str) -> None:
    """Each prompt with another K, so that all of 1..8 take their turn over the two drafts."""
    for index, (ids, expected) in enumerate(zip(prompts, eager, strict=True)):
        k = 0 if draft == "none" else 1 + (index + (4 if draft == "model" else 0)) % K
        result = runtime.generate(ids, max_new_tokens=NUM_TOKENS, num_speculative_tokens=k, draft=draft)
        assert result.token_ids == expected, f"prompt {index}, K = {k}"


@pytest.mark.slow
def test_self_draft_accepts_everything_over_many_tokens(runtime: Runtime, prompts: list[list[int]]) -> None:
    stats = runtime.generate(
        prompts[0], max_new_tokens=SELF_TOKENS, num_speculative_tokens=5, draft="model", ignore_eos=True
    ).stats
    assert stats.completion_tokens == SELF_TOKENS
    assert stats.accepted == stats.drafted


@pytest.mark.slow
def test_streamed_text_is_the_result(runtime: Runtime) -> None:
    stream = runtime.stream([{"role": "user", "content": "Say hello in French, with an emoji."}], max_new_tokens=32)
    pieces = list(stream)
    assert "".join(pieces) == stream.result.text == runtime.codec.decode(stream.result.token_ids)


@pytest.mark.slow
def test_two_sequences_on_one_engine(runtime: Runtime, prompts: list[list[int]], eager: list[list[int]]) -> None:
    """Two open streams take turns and give what each gives alone."""
    streams = [runtime.stream(prompts[i], max_new_tokens=24, draft="model", num_speculative_tokens=3) for i in (0, 1)]
    iterators = [iter(stream) for stream in streams]
    while iterators:
        iterators = [iterator for iterator in iterators if next(iterator, None) is not None]
    assert [stream.result.token_ids for stream in streams] == [eager[0][:24], eager[1][:24]]


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLING)
def test_with_a_seed_the_text_is_the_same_for_every_draft(
    runtime: Runtime, prompts: list[list[int]], name: str
) -> None:
    options = {**SAMPLING[name], "max_new_tokens": 24}
    for seed, ids in enumerate(prompts[:2]):
        plain, *others = [runtime.generate(ids, **options, **way, seed=seed) for way in WAYS]
        for result in others:
            assert (result.token_ids, result.text) == (plain.token_ids, plain.text)
            assert (result.finish_reason, result.stop) == (plain.finish_reason, plain.stop)
    assert runtime.generate(ids, **options, seed=1000).token_ids != plain.token_ids


@pytest.mark.slow
def test_a_drawn_seed_is_reported_and_gives_the_text_again(runtime: Runtime, prompts: list[list[int]]) -> None:
    first = runtime.generate(prompts[0], temperature=0.8, max_new_tokens=24, num_speculative_tokens=0)
    again = runtime.generate(
        prompts[0], temperature=0.8, max_new_tokens=24, num_speculative_tokens=0, seed=first.settings.seed
    )
    assert first.settings.seed is not None
    assert again.token_ids == first.token_ids


@pytest.fixture
def emitted_logits(monkeypatch: pytest.MonkeyPatch) -> list[Array]:
    """The target's logits that each emitted token came from, as the rounds go. [V] f32 each"""
    rows: list[Array] = []
    verify = Target.verify

    def noted(self: Target, committed: Sequence[int], drafted: Sequence[int], *more: bool) -> tuple[int, int]:
        accepted, token = verify(self, committed, drafted, *more)
        rows.extend(self.model.read(LOGITS)[0][: accepted + 1].copy())
        return accepted, token

    monkeypatch.setattr(Target, "verify", noted)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {**SAMPLING["temperature"], "seed": 7}], ids=["greedy", "sampled"])
def test_reproducible_logits_are_the_same_bits_for_every_draft(
    runtime: Runtime, prompts: list[list[int]], emitted_logits: list[Array], options: dict[str, Any]
) -> None:
    """The prefill's too, though the other ways find the prompt in a cache that they did not fill."""
    for ids in prompts[:2]:
        expected: Array | None = None
        for way in WAYS:
            emitted_logits.clear()
            result = runtime.generate(
                ids, **options, **way, reproducible=True, max_new_tokens=32, ignore_eos=True, logprobs=3
            )
            got = np.stack(emitted_logits)[: len(result.token_ids)]  # [N, V], what a limit cut off left out
            if expected is None:
                expected, plain = got, result
            assert result.token_ids == plain.token_ids
            np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))
            assert result.logprobs == plain.logprobs


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=["plain", "self", "n-gram"])
def test_each_token_has_the_log_probability_of_the_target(
    runtime: Runtime,
    prompts: list[list[int]],
    emitted_logits: list[Array],
    way: dict[str, Any],
) -> None:
    """Of its raw logits, for any sampling options."""
    options = {**SAMPLING["penalties"], **way}
    result = runtime.generate(prompts[1], **options, seed=3, max_new_tokens=24, ignore_eos=True, logprobs=5)
    assert result.logprobs is not None
    assert [entry.token_id for entry in result.logprobs] == result.token_ids
    for entry, logits in zip(result.logprobs, emitted_logits, strict=False):
        expected = torch.log_softmax(torch.from_numpy(logits).double(), dim=-1)
        values, ids = expected.topk(5)
        assert entry.logprob == pytest.approx(expected[entry.token_id].item(), abs=1e-4)
        assert [token for token, _ in entry.top] == ids.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.slow
def test_log_probabilities_are_given_only_when_asked_for(runtime: Runtime, prompts: list[list[int]]) -> None:
    assert runtime.generate(prompts[0], max_new_tokens=2).logprobs is None
    result = runtime.generate(prompts[0], max_new_tokens=2, logprobs=0)
    assert result.logprobs is not None
    assert [(entry.token_id, entry.top) for entry in result.logprobs] == [(token, ()) for token in result.token_ids]


@pytest.mark.slow
def test_a_self_draft_is_nearly_always_accepted_when_sampling(runtime: Runtime, prompts: list[list[int]]) -> None:
    """Draft and target have the same distribution, except for rounding in passes of other widths."""
    options: dict[str, Any] = {"temperature": 0.8, "rule": "block", "num_speculative_tokens": 5, "draft": "model"}
    stats = runtime.generate(prompts[0], **options, seed=1, max_new_tokens=60, ignore_eos=True).stats
    assert stats.draft_acceptance_rate is not None
    assert stats.draft_acceptance_rate > 0.97


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int4", "int8", "w8a8"])
def test_quantized_weights_have_the_error_of_the_export_and_the_same_bits_over_widths(
    quantize: str, gguf: Path, tmp_path: Path
) -> None:
    """The kernels that run are those that were measured, and what ``reproducible`` rests on holds for them."""
    export(ExportOptions(str(gguf), tmp_path / "bundle", num_speculative_tokens=K, quantize=quantize))
    with specrt.load(tmp_path / "bundle") as runtime:
        parity = runtime.manifest.target.parity
        assert parity.mean_kl < (0.2 if quantize == "w8a8" else 0.05)
        subject = Subject(tmp_path / "bundle", runtime, [[1, 2, 3]], 8, 1000)
        (reference,), (bits,) = check_reference(subject), check_bits(subject)
    assert bits.passed, bits.found
    assert reference.passed, reference.found
    # The stored positions are some of those that export compared, over other widths.
    assert reference.figures["max_abs_error"] <= 1.1 * parity.max_abs_error
