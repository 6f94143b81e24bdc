"""The watch against a plain search of the whole text, on any cut into tokens; nothing taken is ever withdrawn."""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrt.engines.errors import UsageError
from specrt.runtime.text.detokenizer import Stage, TextStream
from specrt.runtime.text.stops import StopWatch, checked_stops
from tests.runtime.text.tokenizers_made import byte_level, codec, id_of, pieces

Token = tuple[int, bool, bool]  # id, may_stop, whether the text is taken after it


def stream_of(texts: Sequence[str]) -> TextStream:
    """A stream where the text of token i is ``texts[i]``."""
    return TextStream(texts.__getitem__, [Stage()])


def plainly_cut(parts: Sequence[tuple[str, bool]], stops: Sequence[str]) -> tuple[str, str | None, int]:
    """The text of ``parts`` (with may_stop), the stop string found, and in which part."""
    text = ""
    for index, (part, may_stop) in enumerate(parts):
        for char in part:
            text += char
            if found := [stop for stop in stops if may_stop and text.endswith(stop)]:
                stop = max(found, key=len)
                return text.removesuffix(stop), stop, index
    return text, None, len(parts)


def plainly_held(text: str, stops: Sequence[str]) -> str:
    """The longest end of ``text`` with which a stop string begins, but not all of one."""
    ends = (text[start:] for start in range(len(text)))
    return next((end for end in ends if any(s != end and s.startswith(end) for s in stops)), "")


def finished(watch: StopWatch) -> str:
    """The rest of the text."""
    watch.end()
    return watch.take()


def refuses_tokens(watch: StopWatch) -> None:
    with pytest.raises(ValueError, match=r"^the text has ended, .*; make a new StopWatch"):
        watch.push(0)


def check_watch(
    new_stream: Callable[[], TextStream], tokens: Sequence[Token], stops: Sequence[str]
) -> tuple[str, str | None]:
    """Assert that a watch over ``tokens`` gives after each of them what the whole text implies.

    Returns the cut text and the stop string found.
    """
    plain = new_stream()
    parts = [(plain.push(token_id), may_stop) for token_id, may_stop, _ in tokens]
    parts.append((plain.flush(), tokens[-1][1] if tokens else True))
    expected, stop, last = plainly_cut(parts, stops)
    watch = StopWatch(new_stream(), stops)
    final = taken = ""
    for index, (token_id, may_stop, takes) in enumerate(tokens[: last + 1]):
        final += parts[index][0]
        assert watch.push(token_id, may_stop) is (index == last)
        assert watch.matched == (stop if index == last else None)
        if takes:
            taken += watch.take()
            released = expected if index == last else final.removesuffix(plainly_held(final, stops))
            assert taken == released
            assert expected.startswith(taken)
    if last < len(tokens):
        refuses_tokens(watch)
    assert taken + finished(watch) == expected
    assert (watch.matched, watch.take(), finished(watch)) == (stop, "", "")
    refuses_tokens(watch)
    return expected, stop


def tokens_of(ids: st.SearchStrategy[list[int]]) -> st.SearchStrategy[list[Token]]:
    """Ids, most of which may stop and are followed by a take."""
    often = st.sampled_from([True, True, True, False])
    return ids.flatmap(lambda drawn: st.tuples(*(st.tuples(st.just(i), often, often) for i in drawn)).map(list))


def stops_of(alphabet: str, max_chars: int = 6) -> st.SearchStrategy[list[str]]:
    return st.lists(st.text(alphabet, min_size=1, max_size=max_chars), max_size=4)


@settings(max_examples=300)
@given(texts=st.lists(st.text("ab", max_size=5), max_size=12), stops=stops_of("ab"), data=st.data())
def test_any_cut_of_any_text_stops_where_the_whole_text_does(
    texts: list[str], stops: list[str], data: st.DataObject
) -> None:
    tokens = data.draw(tokens_of(st.just(list(range(len(texts))))))
    check_watch(lambda: stream_of(texts), tokens, stops)


@settings(max_examples=150)
@given(data=st.data())
def test_a_long_stop_string_that_nearly_comes(data: st.DataObject) -> None:
    """Pieces of the stop strings themselves, so that long prefixes are held, given up and completed."""
    stops = data.draw(st.lists(st.text("abc", min_size=3, max_size=12), min_size=1, max_size=3))
    cuts = st.sampled_from(stops).flatmap(
        lambda stop: st.tuples(st.integers(0, len(stop)), st.integers(0, len(stop))).map(
            lambda edges: stop[min(edges) : max(edges)]
        )
    )
    texts = data.draw(st.lists(cuts, max_size=10))
    tokens = data.draw(tokens_of(st.just(list(range(len(texts))))))
    check_watch(lambda: stream_of(texts), tokens, stops)


FOREIGN = "a ï你😀न😁"  # 😀 and 😁 differ in the last byte


@settings(max_examples=80)
@given(text=st.text(FOREIGN, max_size=12), stops=stops_of(FOREIGN, 3), data=st.data())
def test_characters_split_over_byte_level_tokens(text: str, stops: list[str], data: st.DataObject) -> None:
    """As merged tokens and as single bytes; where every token may stop, the cut does not depend on them."""
    tokenizer = byte_level()
    encoded = tokenizer.encode(text, add_special_tokens=False).ids
    as_bytes = [id_of(tokenizer, char) for i in encoded for char in tokenizer.id_to_token(i) or ""]
    for ids in (encoded, as_bytes):
        check_watch(codec(tokenizer).stream, data.draw(tokens_of(st.just(ids))), stops)
        always = [(token_id, True, True) for token_id in ids]
        assert check_watch(codec(tokenizer).stream, always, stops) == plainly_cut([(text, True)], stops)[:2]


@settings(max_examples=150)
@given(stops=stops_of("aab ", 3), data=st.data())
def test_bytes_that_become_text_late(stops: list[str], data: st.DataObject) -> None:
    """With byte fallback a run of bytes is final when it ends, breaks or is flushed: many characters at once."""
    tokenizer = pieces("llama")
    words = [id_of(tokenizer, token) for token in ("a", "▁a", "b▁", "")]
    ids = st.lists(st.sampled_from([0x61, 0x61, 0x62, 0x62, 0x20, 0xFF, *words]), max_size=15)
    check_watch(codec(tokenizer).stream, data.draw(tokens_of(ids)), stops)


CUTS: list[tuple[list[str], str, str, str | None]] = [
    (["aab"], "aaabc", "a", "aab"),
    (["abab", "abac"], "ababac", "", "abab"),
    (["abac"], "ababac", "ab", "abac"),
    (["b", "ab"], "aab", "a", "ab"),
    (["ab", "b"], "aab", "a", "ab"),
    (["abcd", "b"], "aabcd", "aa", "b"),
    (["abcd", "bc"], "abcd", "a", "bc"),
    (["aaaa"], "aaabaaa", "aaabaaa", None),
    (["a"], "a", "", "a"),
    (["ab", "ab"], "xab", "x", "ab"),
    ([".\n"], "a.b.\n\n", "a.b", ".\n"),
    ([], "abc", "abc", None),
]


@pytest.mark.parametrize(("stops", "text", "expected", "matched"), CUTS)
def test_every_cut_gives_the_same(stops: list[str], text: str, expected: str, matched: str | None) -> None:
    for edges in product([False, True], repeat=len(text) - 1):
        texts = [text[0]]
        for char, edge in zip(text[1:], edges, strict=True):
            texts[-1:] = [texts[-1], char] if edge else [texts[-1] + char]
        watch = StopWatch(stream_of(texts), stops)
        found = any(watch.push(i) for i in range(len(texts)))
        assert (finished(watch), watch.matched, found) == (expected, matched, matched is not None)


def test_what_is_held_comes_when_it_cannot_match() -> None:
    texts = ["x", "a", "a", "a", "c", "aa", "b", "z"]
    watch = StopWatch(stream_of(texts), ["aab"])
    taken = []
    for index in range(7):
        assert watch.push(index) is (index == 6)
        taken.append(watch.take())
    assert (taken, finished(watch)) == (["x", "", "", "a", "aac", "", ""], "")


def test_a_stop_string_that_may_not_stop_is_text() -> None:
    texts = ["ab", "a", "b", "ab"]
    watch = StopWatch(stream_of(texts), ["ab", "bab"])
    assert [watch.push(0, may_stop=False), watch.take()] == [False, "a"]  # ab is over, but b may begin bab
    assert [watch.push(1, may_stop=False), watch.take()] == [False, ""]
    assert [watch.push(2), watch.matched, finished(watch)] == [True, "bab", ""]


@pytest.mark.parametrize("stop", ["é", "aé", "baé"])
@pytest.mark.parametrize("may_stop", [True, False])
def test_the_flush_completes_a_stop_string(stop: str, may_stop: bool) -> None:
    """The last token says whether it may: the bytes are of that token at the latest."""
    tokenizer = pieces("llama")
    watch = StopWatch(codec(tokenizer).stream(), [stop])
    tokens = [(id_of(tokenizer, "b▁"), True), (id_of(tokenizer, "▁a"), True), (0xC3, True), (0xA9, may_stop)]
    assert not any(watch.push(token_id, may) for token_id, may in tokens)
    text, matched = ("b  aé".removesuffix(stop), stop) if may_stop and stop != "baé" else ("b  aé", None)
    assert (finished(watch), watch.matched) == (text, matched)


def test_a_push_costs_the_same_in_a_long_text() -> None:
    """Quadratic cost would take minutes here."""
    watch = StopWatch(stream_of(["a", "b"]), ["a" * 50 + "b"])
    num_tokens = 200_000
    assert not any(watch.push(0) for _ in range(num_tokens))
    assert watch.push(1)
    assert finished(watch) == "a" * (num_tokens - 50)


KINDS = "expected a string or a list of strings"
BAD_STOPS: list[tuple[Any, str]] = [
    ("", "stop: string 0 is empty, expected one character at least; leave it out"),
    (["a", ""], "stop: string 1 is empty, expected one character at least; leave it out"),
    (None, f"stop: got NoneType, {KINDS}; pass [] for none"),
    (b"ab", f"stop: got bytes, {KINDS}; pass [] for none"),
    ({"a"}, f"stop: got set, {KINDS}; pass [] for none"),
    (["a", 13], f"stop: item 1 is int, {KINDS}; pass it as text"),
    ([["a"]], f"stop: item 0 is list, {KINDS}; pass it as text"),
]


@pytest.mark.parametrize(("stops", "message"), BAD_STOPS, ids=range(len(BAD_STOPS)))
@pytest.mark.parametrize("check", [checked_stops, partial(StopWatch, stream_of([]))], ids=["check", "watch"])
def test_bad_stops_get_one_line(check: Callable[[Any], Any], stops: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check(stops)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("stops", "expected"), [("ab", ("ab",)), ([], ()), (("b", "a", "b"), ("b", "a", "b")), (UserList(["a"]), ("a",))]
)
def test_a_string_or_a_sequence_is_taken(stops: Any, expected: tuple[str, ...]) -> None:
    assert checked_stops(stops) == expected
