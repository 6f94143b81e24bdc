"""Tokens that hold parts of characters: the stream's text lags behind the ids."""

from __future__ import annotations

import pytest

from specrt.runtime.settings import Settings
from tests.runtime.support.bundles import DRAFT, PROMPT, TABLE, Backend, Open
from tests.runtime.support.plain import decode

K = 8
CONTINUATION = decode(TABLE, Settings(max_new_tokens=20), PROMPT, max_seq_len=48)
MARK = "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("k", range(K + 1))
def test_bytes_that_become_text_late_stop_at_the_token_that_shows_them(
    open_bundle: Open, backend: Backend, k: int
) -> None:
    """Each word ends with half a character, which is one that cannot be read once the next word, or the end, comes."""
    backend.target, backend.draft, backend.k = TABLE, DRAFT, K
    runtime = open_bundle(ending="\u00c3")
    spelled = [f"w{token}" for token in CONTINUATION]
    for count in range(1, 9):
        stop = spelled[count - 1] + MARK
        result = runtime.generate(PROMPT, stop=stop, max_new_tokens=20, num_speculative_tokens=k, logprobs=0)
        assert (result.finish_reason, result.stop) == ("stop", stop)
        assert result.token_ids == CONTINUATION[: count + 1] and len(result.logprobs or []) == count + 1
        assert result.text == MARK.join(spelled[: count - 1]) + MARK * (count > 1)
        at_the_end = runtime.generate(PROMPT, stop=stop, max_new_tokens=count, num_speculative_tokens=k)
        assert (at_the_end.token_ids, at_the_end.text) == (CONTINUATION[:count], result.text)
        assert (at_the_end.finish_reason, at_the_end.stop) == ("stop", stop)


@pytest.mark.parametrize("draft", ["none", "model", "ngram"])
@pytest.mark.parametrize("num_tokens", [1, 2, 7])
def test_a_text_that_is_cut_inside_a_character_ends_with_one_mark(
    open_bundle: Open, num_tokens: int, draft: str
) -> None:
    """Each token ends with three of the four bytes of an emoji: the stream, the text, the ids and the usage agree."""
    runtime = open_bundle(ending="ðŁĺ")
    stream = runtime.stream(PROMPT, max_new_tokens=num_tokens, draft=draft)
    pieces = list(stream)
    result = stream.result
    assert "".join(pieces) == result.text == runtime.codec.decode(result.token_ids)
    assert (len(result.token_ids), result.stats.completion_tokens, result.finish_reason) == (num_tokens,) * 2 + (
        "length",
    )
    assert result.text.endswith(MARK) and result.text.count(MARK) == num_tokens


def test_a_stop_string_can_be_the_mark_of_a_cut_character(open_bundle: Open) -> None:
    runtime = open_bundle(ending="ðŁĺ")
    result = runtime.generate(PROMPT, max_new_tokens=1, stop=MARK)
    assert (result.finish_reason, result.stop) == ("stop", MARK)
    assert result.text + MARK == runtime.codec.decode(result.token_ids)
