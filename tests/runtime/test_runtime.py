"""The open bundle on the fake backend: speculation changes no answer, and what is interrupted leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import pytest

from specrt.engines import backends
from specrt.engines.errors import BackendError, BundleError, ParityError, UsageError
from specrt.runtime.runtime import load
from tests.runtime.support.bundles import (
    CONTEXT,
    DRAFT_CONTEXT,
    PROMPT,
    VOCAB_SIZE,
    Backend,
    FailingTable,
    K,
    Open,
    num_slots,
    target_table,
    write_bundle,
)


def plain(prompt: Sequence[int], count: int) -> list[int]:
    """PLAIN: the ``count`` tokens after ``prompt``."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(target_table(tokens))
    return tokens[len(prompt) :]


# --- answers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bundled", ["ngram", "self", "model"])
@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, None])
def test_every_draft_and_k_gives_the_same_answer(open_bundle: Open, bundled: str, k: int | None) -> None:
    runtime = open_bundle(bundled)
    kinds = ["ngram", "none", None] + ["model"] * (bundled != "ngram")
    for draft in kinds:
        result = runtime.generate(PROMPT, max_new_tokens=30, num_speculative_tokens=k, draft=draft)
        assert result.token_ids == plain(PROMPT, 30)
        assert (result.finish_reason, result.stats.completion_tokens) == ("length", 30)


@pytest.mark.parametrize(("bundled", "rate"), [("self", 1.0), ("ngram", None)])
def test_the_bundle_s_own_draft_is_the_default(open_bundle: Open, bundled: str, rate: float | None) -> None:
    """The hash of the whole prefix never repeats an n-gram here, so n-gram lookup finds nothing to draft."""
    result = open_bundle(bundled).generate(PROMPT, max_new_tokens=30, num_speculative_tokens=K)
    assert result.stats.draft_acceptance_rate == rate


@pytest.mark.parametrize(("k", "draft"), [(0, None), (0, "model"), (None, "none"), (3, "none")])
def test_no_speculation_asks_no_draft(open_bundle: Open, backend: Backend, k: int | None, draft: str | None) -> None:
    stats = open_bundle().generate(PROMPT, max_new_tokens=9, num_speculative_tokens=k, draft=draft).stats
    assert backend.engines["draft"].num_passes == 0
    assert (stats.rounds, stats.drafted) == (8, 0)


def test_k_is_the_bundle_s_or_what_is_asked_for(open_bundle: Open) -> None:
    runtime = open_bundle("self")
    stats = runtime.generate(PROMPT, max_new_tokens=21, num_speculative_tokens=K).stats
    assert stats.acceptance_histogram == [0, 0, 0, 0, 4] == stats.drafted_histogram
    adaptive = runtime.generate(PROMPT, max_new_tokens=40).stats
    assert len(adaptive.drafted_histogram) <= K + 1 and adaptive.plain_round_ms is not None
    stats = runtime.generate(PROMPT, max_new_tokens=21, num_speculative_tokens=1).stats
    assert stats.acceptance_histogram == [0, 10]


def test_a_prompt_may_be_text(open_bundle: Open) -> None:
    result = open_bundle().generate("w3 w1 w4 w1 w5", max_new_tokens=6)
    assert result.token_ids == plain(PROMPT, 6)
    assert result.text == " ".join(f"w{token}" for token in plain(PROMPT, 6))
    assert result.stats.prompt_tokens == 5


@pytest.mark.parametrize("place", range(12))
def test_an_eos_of_the_bundle_stops_unless_ignored(open_bundle: Open, place: int) -> None:
    expected = plain(PROMPT, 20)
    eos = expected[place]
    cut = expected.index(eos) + 1
    runtime = open_bundle(eos=[eos])
    result = runtime.generate(PROMPT, max_new_tokens=20)
    assert (result.token_ids, result.finish_reason) == (expected[:cut], "stop")
    result = runtime.generate(PROMPT, max_new_tokens=20, ignore_eos=True)
    assert (result.token_ids, result.finish_reason) == (expected, "length")


@pytest.mark.parametrize("length", [1, DRAFT_CONTEXT - 1, DRAFT_CONTEXT, DRAFT_CONTEXT + 1, CONTEXT - 2, CONTEXT - 1])
def test_the_context_is_filled_to_its_end(open_bundle: Open, length: int) -> None:
    result = open_bundle().generate([7] * length, max_new_tokens=99)
    assert result.token_ids == plain([7] * length, CONTEXT - length)
    assert result.finish_reason == "length"


def test_no_new_tokens_is_an_empty_answer(open_bundle: Open, backend: Backend) -> None:
    result = open_bundle().generate(PROMPT, max_new_tokens=0)
    assert (result.token_ids, result.text, result.finish_reason) == ([], "", "length")
    assert (result.stats.prompt_tokens, result.stats.rounds) == (5, 0)
    assert backend.engines["target"].num_passes == 0


def test_a_stream_s_pieces_are_the_text_and_its_ids_grow_with_them(open_bundle: Open) -> None:
    stream = open_bundle().stream(PROMPT, max_new_tokens=20)
    pieces = []
    with pytest.raises(RuntimeError, match="the stream has not ended"):
        _ = stream.result
    for piece in stream:
        pieces.append(piece)
        assert "".join(pieces) == " ".join(f"w{token}" for token in stream.token_ids)
    assert len(pieces) > 5
    assert stream.result.text == "".join(pieces)
    assert stream.result.token_ids == stream.token_ids == plain(PROMPT, 20)
    assert stream.result.stats.total_ms >= stream.result.stats.verify_ms > 0


def test_what_the_text_holds_back_comes_at_the_end(open_bundle: Open) -> None:
    """Each token ends with the first of two bytes of a character, here spelled as the byte-level alphabet does."""
    stream = open_bundle(ending="\u00c3").stream(PROMPT, max_new_tokens=3)
    first, second, third = (f"w{token}" for token in plain(PROMPT, 3))
    pieces = list(stream)
    assert pieces[0] == first
    assert pieces[-1].endswith("\N{REPLACEMENT CHARACTER}")
    assert stream.result.text == "".join(pieces) == "\N{REPLACEMENT CHARACTER}".join([first, second, third, ""])


# --- one sequence after and next to another -------------------------------------------------------------------------


@pytest.mark.parametrize("fails_at", range(1, 12))
def test_a_draft_that_raises_leaves_a_runtime_that_answers(open_bundle: Open, backend: Backend, fails_at: int) -> None:
    """In its prefill, or at its first or a later token of a round, when the target's cache holds another prompt."""
    runtime = open_bundle()
    cast(FailingTable, backend.draft).fails_at = fails_at
    with pytest.raises(OSError, match="the draft is gone"):
        runtime.generate([9] * 11, max_new_tokens=20, num_speculative_tokens=K)
    for _ in range(2):
        assert runtime.generate(PROMPT, max_new_tokens=20).token_ids == plain(PROMPT, 20)
    assert num_slots(backend) == [1, 1]


def test_a_draft_without_memory_costs_the_target_no_slot(
    open_bundle: Open, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = open_bundle()

    def refuse(*_: object) -> NoReturn:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(backend.engines["draft"], "open", refuse)
        for _ in range(3):
            with pytest.raises(MemoryError):
                runtime.generate(PROMPT, max_new_tokens=20, num_speculative_tokens=K)
    assert num_slots(backend) == [1, 0]
    assert runtime.generate(PROMPT, max_new_tokens=20).token_ids == plain(PROMPT, 20)


@pytest.mark.parametrize("num_pieces", [0, 1, 2, 5])
def test_a_stream_that_is_closed_gives_its_slots_back(open_bundle: Open, backend: Backend, num_pieces: int) -> None:
    runtime = open_bundle()
    stream = runtime.stream([9] * 11, max_new_tokens=20)
    pieces = iter(stream)
    for _ in range(num_pieces):
        next(pieces)
    stream.close()
    assert list(stream) == []
    with pytest.raises(RuntimeError, match="the stream has not ended"):
        _ = stream.result
    result = runtime.generate(PROMPT, max_new_tokens=20)
    assert result.token_ids == plain(PROMPT, 20)
    assert num_slots(backend) == [1, 1]


@pytest.mark.parametrize(("bundled", "slots"), [("self", [2 * 3]), ("model", [3, 3])])
def test_streams_next_to_each_other_answer_as_alone(
    open_bundle: Open, backend: Backend, bundled: str, slots: list[int]
) -> None:
    runtime = open_bundle(bundled)
    prompts = [PROMPT, [2, 7, 1, 8], [9] * 20]
    streams = [runtime.stream(prompt, max_new_tokens=20) for prompt in prompts]
    waiting = [iter(stream) for stream in streams]
    while waiting:
        waiting = [pieces for pieces in waiting if next(pieces, None) is not None]
    assert [stream.result.token_ids for stream in streams] == [plain(prompt, 20) for prompt in prompts]
    assert num_slots(backend) == slots
    runtime.generate(PROMPT, max_new_tokens=3)
    assert num_slots(backend) == slots


def test_the_same_request_gives_the_same_figures_after_others(open_bundle: Open) -> None:
    runtime = open_bundle()

    def figures() -> list[int]:
        return runtime.generate(PROMPT, max_new_tokens=30, num_speculative_tokens=K).stats.acceptance_histogram

    first = figures()
    runtime.generate([9] * 30, max_new_tokens=7)
    assert figures() == first


def test_closing_gives_every_slot_back(open_bundle: Open, backend: Backend) -> None:
    with open_bundle() as runtime:
        runtime.generate(PROMPT, max_new_tokens=3)
        assert num_slots(backend) == [1, 1]
    assert num_slots(backend) == [0, 0]


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens: got -1, expected a whole number of 0 or more"),
        ({"num_speculative_tokens": 5}, "num_speculative_tokens: got 5, this bundle was exported for 0 to 4"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens: got -1"),
        ({"draft": "oracle"}, "draft: got 'oracle', expected one of auto, ngram, model, none"),
        ({"draft": "model"}, "draft: got 'model', but this bundle has none"),
        ({"rule": "leniency"}, "rule: got 'leniency', expected one of match, block"),
        ({"colour": "blue"}, "colour: not an option of a generation; expected some of add_generation_prompt, "),
        ({"stop": [""]}, "stop: string 0 is empty"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids: got 64, expected ids in 0..63"),
        ({"prompt": [1] * CONTEXT}, "prompt: 48 tokens, the bundle's context is 48"),
        ({"prompt": []}, "prompt: got no tokens"),
        ({"prompt": [VOCAB_SIZE]}, "prompt: token 0 is 64"),
    ],
)
def test_options_that_are_refused_before_anything_runs(
    open_bundle: Open, backend: Backend, options: dict[str, Any], message: str
) -> None:
    runtime = open_bundle("ngram")
    with pytest.raises(UsageError) as caught:
        runtime.stream(**{"prompt": PROMPT, **options})
    assert str(caught.value).startswith(message)
    assert len(str(caught.value).splitlines()) == 1
    assert num_slots(backend) == [0]


def test_no_threads_are_refused(tmp_path: Path, backend: Backend) -> None:
    with pytest.raises(UsageError, match="threads: got 0, expected 1 or more"):
        load(write_bundle(tmp_path / "bundle", "ngram", ()), threads=0)


def test_a_backend_the_bundle_does_not_list_is_refused(tmp_path: Path, backend: Backend) -> None:
    with pytest.raises(BackendError, match="backend onnxruntime: this bundle was exported for fake"):
        load(write_bundle(tmp_path / "bundle", "ngram", ()), backend="onnxruntime")


def test_a_backend_this_specrt_does_not_have_is_refused(
    tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(backends.BACKENDS, "fake")
    with pytest.raises(BackendError, match="backend fake: this specrt has onnxruntime"):
        load(write_bundle(tmp_path / "bundle", "ngram", ()))


def test_a_file_that_was_changed_is_refused(tmp_path: Path, backend: Backend) -> None:
    bundle = write_bundle(tmp_path / "bundle", "ngram", ())
    (bundle / "target" / "samplers" / "match").write_text("target/samplers/matcH")
    with pytest.raises(BundleError, match="SHA-256 is"):
        load(bundle)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused_and_the_slot_is_free_again(
    open_bundle: Open, backend: Backend, value: float
) -> None:
    """An overflow of a half-precision model: greedy text would be token 0 for ever, with every draft accepted."""
    finite = np.eye(VOCAB_SIZE, dtype=np.float32)[7]
    backend.target = lambda prefix: np.where(np.arange(VOCAB_SIZE) == 3, value, finite) if prefix[0] == 1 else finite
    runtime = open_bundle("self")
    with pytest.raises(ParityError, match=f"target: the largest logit after the prompt is {value} in float32"):
        runtime.generate([1, 2])
    assert runtime.generate([2, 1], max_new_tokens=3).token_ids == [7, 7, 7]
    assert num_slots(backend) == [2]
