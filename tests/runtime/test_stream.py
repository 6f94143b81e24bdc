"""Where a text ends: stop strings, stop ids and lengths cut ids, text, log-probabilities, figures and caches.

PLAIN looks for stop strings in the text of each beginning of the plain ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from specrt.engines import backends
from specrt.engines.interface import CPU
from specrt.runtime.result import Result
from specrt.runtime.runtime import Runtime, load
from specrt.runtime.settings import Settings
from tests.runtime.support.bundles import DRAFT, PROMPT, TABLE, VOCAB_SIZE, Backend, num_slots, write_bundle
from tests.runtime.support.plain import NearEdge, decode

K, EOS = 8, 63


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """A model's drafts, K = 8 at most, and the EOS id 63."""
    backend, folder = Backend(TABLE, DRAFT, K), tmp_path_factory.mktemp("stream")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECRT_CACHE", str(folder / "cache"))
        patch.setitem(backends.BACKENDS, "fake", {CPU: backend.open})
        with load(write_bundle(folder / "bundle", "model", [EOS], backend=backend)) as opened:
            yield opened


class Plain(NamedTuple):
    token_ids: list[int]
    text: str
    finish_reason: str
    stop: int | str | None


def words(ids: Sequence[int]) -> str:
    return " ".join(f"w{token}" for token in ids)


def plain(
    prompt: Sequence[int],
    stops: Sequence[str] = (),
    ending_ids: Sequence[int] = (),
    min_new_tokens: int = 0,
    max_new_tokens: int = 20,
    **sampling: Any,
) -> Plain:
    """The first place where a stop string ends that ``min_new_tokens`` lets count, or else an id or the length."""
    settings = Settings(
        max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens, ending_ids=tuple(ending_ids), **sampling
    )
    ids = decode(TABLE, settings, prompt, max_seq_len=48)
    for count in range(max(min_new_tokens, 1), len(ids) + 1):
        text = words(ids[:count])
        for end in range(len(words(ids[: count - 1])) + 1, len(text) + 1):
            if found := [stop for stop in stops if text[:end].endswith(stop)]:
                stop = max(found, key=len)
                return Plain(ids[:count], text[: end - len(stop)], "stop", stop)
    ended = bool(ids) and ids[-1] in ending_ids
    return Plain(ids, words(ids), "stop" if ended else "length", ids[-1] if ended else None)


def outcome(result: Result) -> Plain:
    return Plain(result.token_ids, result.text, result.finish_reason, result.stop)


def check(runtime: Runtime, prompt: Sequence[int], expected: Plain, **options: Any) -> Result:
    """Pieces, result, figures and log-probabilities of a generation agree, and so do the caches it leaves."""
    stream = runtime.stream(prompt, logprobs=0, **options)
    pieces = []
    for piece in stream:
        pieces.append(piece)
        assert piece and expected.text.startswith("".join(pieces))
    result = stream.result
    assert outcome(result) == expected
    assert "".join(pieces) == result.text
    stats = result.stats
    assert [entry.token_id for entry in result.logprobs or []] == result.token_ids
    assert stats.completion_tokens == len(result.token_ids) == bool(result.token_ids) + stats.accepted + stats.own
    assert stats.rounds == sum(stats.acceptance_histogram)
    longer = [*prompt, *result.token_ids, 1]
    if result.token_ids and len(longer) < 48:
        after = runtime.generate(longer, max_new_tokens=1, reproducible=options.get("reproducible"))
        assert after.stats.reused_prompt_tokens == len(longer) - 2  # all but the newest and this one
        assert after.token_ids == [int(np.argmax(TABLE(longer)))]
    return result


# --- each way to end, at each K ------------------------------------------------------------------------------------

CONTINUATION = plain(PROMPT).token_ids
each_k = pytest.mark.parametrize("k", range(K + 1))
each_draft = pytest.mark.parametrize("draft", ["model", "ngram"])


@each_k
@each_draft
def test_a_stop_string_over_several_tokens_ends_the_text_before_it(runtime: Runtime, k: int, draft: str) -> None:
    """From the middle of a word to the middle of a later one, at each place of the text."""
    for place in range(14):
        before, inside = words(CONTINUATION[:place]), words(CONTINUATION[: place + 3])
        stop = inside[len(before) + 2 : -1]
        expected = plain(PROMPT, [stop])
        assert expected.finish_reason == "stop"
        check(runtime, PROMPT, expected, max_new_tokens=20, stop=stop, num_speculative_tokens=k, draft=draft)


@each_k
def test_a_stop_id_and_eos_end_the_text_with_them(runtime: Runtime, k: int) -> None:
    for place in range(14):
        token = CONTINUATION[place]
        expected = plain(PROMPT, ending_ids=[token, EOS])
        assert expected.stop == token
        options = {"max_new_tokens": 20, "num_speculative_tokens": k}
        check(runtime, PROMPT, expected, stop_token_ids=[token], **options)


@each_k
def test_min_new_tokens_defers_ids_and_strings(runtime: Runtime, k: int) -> None:
    """The id is not generated before, other ids take its place; the string is text."""
    for place, min_new_tokens in [(0, 1), (0, 5), (2, 3), (2, 4), (5, 9), (5, 6)]:
        token = CONTINUATION[place]
        options = {"min_new_tokens": min_new_tokens, "num_speculative_tokens": k, "max_new_tokens": 20}
        by_id = plain(PROMPT, ending_ids=[token, EOS], min_new_tokens=min_new_tokens)
        assert token not in by_id.token_ids[:min_new_tokens]
        check(runtime, PROMPT, by_id, stop_token_ids=[token], **options)
        by_string = plain(PROMPT, ["w"], min_new_tokens=min_new_tokens)
        assert len(by_string.token_ids) == min_new_tokens
        assert by_string.text == words(by_string.token_ids[:-1]) + " " * (min_new_tokens > 1)
        check(runtime, PROMPT, by_string, stop=["w"], **options)


@each_k
def test_a_match_at_the_last_token_wanted_is_a_stop(runtime: Runtime, k: int) -> None:
    for count in range(2, 12):
        stop = words(CONTINUATION[:count])[-3:]
        expected = plain(PROMPT, [stop], max_new_tokens=count)
        if len(expected.token_ids) == count:
            assert (expected.finish_reason, expected.stop) == ("stop", stop)
        check(runtime, PROMPT, expected, stop=stop, max_new_tokens=count, num_speculative_tokens=k)
        token = CONTINUATION[count - 1]
        expected = plain(PROMPT, ending_ids=[token, EOS], max_new_tokens=count)
        assert (expected.finish_reason, expected.stop) == ("stop", token)
        check(runtime, PROMPT, expected, stop_token_ids=[token], max_new_tokens=count, num_speculative_tokens=k)


@each_k
def test_a_token_that_completes_a_string_and_is_an_ending_id(runtime: Runtime, k: int) -> None:
    token = CONTINUATION[6]
    result = runtime.generate(
        PROMPT, stop=[f" w{token}"], stop_token_ids=[token], max_new_tokens=20, num_speculative_tokens=k
    )
    assert outcome(result) == Plain(CONTINUATION[:7], words(CONTINUATION[:6]), "stop", f" w{token}")


@each_k
def test_the_prompt_s_text_does_not_count(runtime: Runtime, k: int) -> None:
    stops = [f"w{PROMPT[-1]} w{CONTINUATION[0]}", f" w{CONTINUATION[0]} w{CONTINUATION[1]}"]
    result = check(runtime, PROMPT, plain(PROMPT, stops), stop=stops, max_new_tokens=20, num_speculative_tokens=k)
    assert result.token_ids == CONTINUATION


@each_k
def test_a_string_that_never_comes_holds_nothing_back_in_the_end(runtime: Runtime, k: int) -> None:
    stops = [words(CONTINUATION[-3:]) + "!", words(CONTINUATION)[5:] + " "]
    result = check(runtime, PROMPT, plain(PROMPT, stops), stop=stops, max_new_tokens=20, num_speculative_tokens=k)
    assert (result.finish_reason, result.text) == ("length", words(CONTINUATION))


# --- all at once ---------------------------------------------------------------------------------------------------


def plain_or_reject(*arguments: Any, **options: Any) -> Plain:
    try:
        return plain(*arguments, **options)
    except NearEdge:
        reject()


@hypothesis_settings(max_examples=150)
@given(data=st.data())
def test_every_end_is_plain_s(runtime: Runtime, data: st.DataObject) -> None:
    prompt = data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=46))
    sampling: dict[str, Any] = data.draw(st.sampled_from([{}, {"temperature": 1.0, "seed": 5}]))
    count = data.draw(st.integers(0, 25))
    ids = plain_or_reject(prompt, max_new_tokens=count, **sampling).token_ids
    text = words(ids) or "w"
    cuts = st.tuples(st.integers(0, len(text)), st.integers(1, 9)).map(lambda cut: text[cut[0] :][: cut[1]] or "!")
    stops = data.draw(st.lists(cuts, max_size=2))
    stop_ids = data.draw(st.lists(st.sampled_from(ids or [0]), max_size=2))
    options: dict[str, Any] = {
        **sampling,
        "max_new_tokens": count,
        "min_new_tokens": data.draw(st.integers(0, count)),
    }
    expected = plain_or_reject(prompt, stops, [*stop_ids, EOS], **options)
    options["num_speculative_tokens"] = data.draw(st.integers(0, K))
    options["draft"] = data.draw(st.sampled_from(["model", "ngram", None]))
    check(runtime, prompt, expected, stop=stops, stop_token_ids=stop_ids, **options)


# --- steps and slots -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["model", "ngram", "none"])
def test_steps_are_the_rounds_of_the_stream(runtime: Runtime, draft: str) -> None:
    """Text, ids and log-probabilities of all steps are the result's, and each counts drafted and accepted tokens."""
    options: dict[str, Any] = {"max_new_tokens": 30, "draft": draft, "logprobs": 1, "stop": ["w1 w2 w3"]}
    expected = runtime.generate(PROMPT, num_speculative_tokens=K, **options)
    stream = runtime.stream(PROMPT, num_speculative_tokens=K, **options)
    assert stream.elapsed_ms == 0
    steps = list(stream.steps)
    assert "".join(step.text for step in steps) == stream.result.text == expected.text
    assert [token for step in steps for token in step.round.emitted] == expected.token_ids
    assert [entry for step in steps for entry in step.round.logprobs] == expected.logprobs
    stats = stream.result.stats
    assert (len(steps[0].round.drafted), len(steps[0].round.emitted)) == (0, 1)
    assert sum(len(step.round.drafted) for step in steps) == stats.drafted
    assert sum(step.round.num_accepted for step in steps) == stats.accepted
    assert sum(len(step.round.emitted) - step.round.num_accepted for step in steps) == stats.own + 1
    assert stream.elapsed_ms == stats.total_ms > 0


def test_a_long_prompt_is_read_in_steps_that_emit_nothing(runtime: Runtime) -> None:
    """Passes of 10 here: 25 tokens are two passes before the last one; what was read before a stop is kept."""
    prompt = [(5 * index + 2) % 60 for index in range(25)]
    stream = runtime.stream(prompt, max_new_tokens=12, num_speculative_tokens=K)
    next(stream.steps)
    stream.close()
    stream = runtime.stream(prompt, max_new_tokens=12, num_speculative_tokens=K)
    steps = list(stream.steps)
    assert stream.result.stats.reused_prompt_tokens == 10
    assert [len(step.round.emitted) for step in steps[:2]] == [0, 1]
    assert stream.result.token_ids == plain(prompt, ending_ids=[EOS], max_new_tokens=12).token_ids
    assert stream.result.stats.rounds == len(steps) - 2


def test_steps_that_are_left_give_the_slot_back(runtime: Runtime) -> None:
    num_idle = runtime.num_idle_slots
    stream = runtime.stream(PROMPT, max_new_tokens=30)
    next(stream.steps)
    assert runtime.num_idle_slots == max(0, num_idle - 1) and stream.elapsed_ms > 0
    stream.close()
    assert runtime.num_idle_slots == max(1, num_idle)


def test_reserved_slots_are_there_before_they_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend(TABLE, DRAFT, K)
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(backends.BACKENDS, "fake", {CPU: backend.open})
    with load(write_bundle(tmp_path / "bundle", "model", [EOS], backend=backend)) as opened:
        opened.reserve(3)
        assert opened.num_idle_slots == 3 and num_slots(backend) == [3, 3]
        streams = [opened.stream(PROMPT, max_new_tokens=5) for _ in range(3)]
        for stream in streams:
            next(stream.steps)
        assert opened.num_idle_slots == 0 and num_slots(backend) == [3, 3]
        for stream in streams:
            for _ in stream.steps:
                pass
        found = [stream.result.token_ids for stream in streams]
        assert opened.num_idle_slots == 3 and found == [opened.generate(PROMPT, max_new_tokens=5).token_ids] * 3
