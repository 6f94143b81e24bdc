"""The joined stream equals the decode of all ids, for every kind of decoder and any ids."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from specrt.engines.errors import UnsupportedModelError
from specrt.runtime.text.codec import TextCodec
from specrt.runtime.text.detokenizer import CLEANUP, REPLACEMENT
from tests.runtime.text.tokenizers_made import (
    ADDED,
    BOS,
    BYTES,
    EOS,
    FUSE,
    PIECE_DECODERS,
    SPACE,
    VOCAB_SIZE,
    byte_level,
    codec,
    id_of,
    pieces,
    real_codec,
    real_tokenizer,
)


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids: evenly drawn ones (mostly invalid bytes), those of a text, and ids beyond the vocabulary."""
    drawn = st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=30)
    written = st.text(max_size=12).map(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    rare = st.integers(max(0, tokenizer.get_vocab_size() - 20), tokenizer.get_vocab_size() - 1)
    parts = st.lists(st.one_of(drawn, written, st.lists(rare, max_size=4)), max_size=4)
    return parts.map(lambda lists: [token_id for ids in lists for token_id in ids])


def check_stream(text_codec: TextCodec, ids: list[int]) -> list[str]:
    """Assert that the joined stream is the decode of all ids; return what each push gave."""
    stream = text_codec.stream()
    pushes = [stream.push(token_id) for token_id in ids]
    assert "".join(pushes) + stream.flush() == text_codec.decode(ids)
    return pushes


@given(ids_of(byte_level()))
def test_byte_level_stream_equals_decode(ids: list[int]) -> None:
    check_stream(codec(byte_level()), ids)


@pytest.mark.parametrize("name", PIECE_DECODERS)
@given(data=st.data())
def test_piece_stream_equals_decode(name: str, data: st.DataObject) -> None:
    check_stream(codec(pieces(name)), data.draw(ids_of(pieces(name))))


@pytest.mark.parametrize("name", ["none", "word pieces", "word ends", "gemma"])
@given(data=st.data())
def test_a_cleaned_stream_equals_the_cleaned_decode(name: str, data: st.DataObject) -> None:
    """Apostrophes, marks and the ends that are cleaned, split over tokens in every way."""
    tokens = [
        " ",
        "'",
        " '",
        "' ",
        "n",
        "'t",
        "t",
        "s",
        "'s",
        "re",
        "ve",
        "'r",
        "e",
        "m",
        ".",
        " .",
        "?",
        "!",
        ",",
        "▁",
        "a",
    ]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    if PIECE_DECODERS[name] is not None:
        tokenizer.decoder = PIECE_DECODERS[name]
    text_codec = TextCodec(tokenizer, VOCAB_SIZE, None, {}, clean_up_spaces=True)
    ids = data.draw(st.lists(st.integers(0, len(tokens) - 1), max_size=12))
    text = tokenizer.decode(ids)
    for old, new in CLEANUP:
        text = text.replace(old, new)
    assert text_codec.decode(ids) == text
    check_stream(text_codec, ids)


@pytest.mark.parametrize("tokenizer", [byte_level(), pieces("llama"), pieces("gemma")], ids=["bytes", "llama", "gemma"])
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=f"{REPLACEMENT}{ADDED}")))
def test_no_push_holds_a_broken_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert not any(REPLACEMENT in push for push in check_stream(codec(tokenizer), ids))


def test_characters_come_when_they_are_whole() -> None:
    tokenizer = byte_level()
    special = id_of(tokenizer, EOS)
    first, *rest = (id_of(tokenizer, char) for char in "ðŁĺĢ")  # the four bytes of an emoji
    stream = codec(tokenizer).stream()
    assert [stream.push(i) for i in (first, special, *rest)] == ["", "", "", "", "😀"]
    assert [stream.push(first), stream.flush()] == ["", REPLACEMENT]


def test_a_run_of_byte_tokens_is_decoded_as_a_whole() -> None:
    """One wrong byte spoils characters before it in the run, so none may have been emitted."""
    tokenizer = pieces("llama")
    good, bad, word = [0xE4, 0xBD, 0xA0], 0xFF, id_of(tokenizer, "▁a")
    assert check_stream(codec(tokenizer), [*good, word]) == ["", "", "", "你 a"]
    assert check_stream(codec(tokenizer), [*good, bad, bad, word]) == ["", "", "", REPLACEMENT * 4, REPLACEMENT, " a"]


@pytest.mark.parametrize(
    ("tokenizer", "token"), [(byte_level(), "ÿ"), (pieces("llama"), "<0xFF>")], ids=["bytes", "llama"]
)
def test_endless_invalid_bytes_are_not_held(tokenizer: Tokenizer, token: str) -> None:
    ids = [id_of(tokenizer, token)] * 20_000
    assert check_stream(codec(tokenizer), ids) == [REPLACEMENT] * len(ids)


def test_a_push_costs_the_same_in_a_long_run() -> None:
    """Quadratic cost would take minutes here."""
    pushes = check_stream(codec(pieces("llama")), [0x61] * 200_000)
    assert set(pushes) == {""}


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.Sequence([FUSE, SPACE]),
        decoders.Sequence([FUSE, BYTES]),
        decoders.Sequence([FUSE, decoders.Strip(" ", 0, 1)]),
    ],
    ids=["CTC", "Replace", "ByteFallback", "Strip"],
)
def test_a_decoder_that_cannot_be_streamed_is_refused(decoder: Any, request: pytest.FixtureRequest) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.decoder = decoder
    with pytest.raises(UnsupportedModelError, match=r"^tokenizer: decoder \w+ cannot be streamed there, expected .*; "):
        codec(tokenizer)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b", "gemma3-270m"])
@given(data=st.data())
def test_real_streams_equal_decode(name: str, data: st.DataObject) -> None:
    ids = data.draw(ids_of(real_tokenizer(name).backend_tokenizer))
    text_codec = real_codec(name)
    check_stream(text_codec, ids)
    assert text_codec.decode(ids) == real_tokenizer(name).decode(ids, skip_special_tokens=True)


def test_special_tokens_may_be_part_of_the_text() -> None:
    tokenizer = byte_level()
    made = codec(tokenizer)
    ids = [id_of(tokenizer, BOS), *tokenizer.encode("fox", add_special_tokens=False).ids, id_of(tokenizer, EOS)]

    def text(visible: tuple[str, ...]) -> str:
        stream = made.stream(visible)
        return "".join(map(stream.push, ids)) + stream.flush()

    assert (text(()), text((EOS,)), text((BOS, EOS))) == ("fox", f"fox{EOS}", f"{BOS}fox{EOS}")


@pytest.mark.parametrize("text", ["the quick brown fox", "naïve café", "你好 😀 two words"])
def test_the_bytes_of_tokens_make_up_the_text(text: str) -> None:
    tokenizer = byte_level()
    made = codec(tokenizer)
    ids = made.ids_of_text(text, add_special_tokens=False)
    assert b"".join(map(made.token_bytes, ids)).decode(errors="replace") == made.decode(ids)
    assert made.token_bytes(id_of(tokenizer, EOS)) == EOS.encode()
    assert made.token_bytes(VOCAB_SIZE - 1) == b""  # an id that only pads the vocabulary


def test_the_bytes_of_word_pieces_keep_their_spaces() -> None:
    for name in ("llama", "gemma", "metaspace"):
        tokenizer = pieces(name)
        made = codec(tokenizer)
        tokens = {"<0xE4>": b"\xe4", "▁a": b" a", "a": b"a", "你": "你".encode()}
        assert {token: made.token_bytes(id_of(tokenizer, token)) for token in tokens} == tokens, name


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    """A server does. The negative control is ``encode`` itself, which keeps Python's lock."""
    tokenizer, text = byte_level(), "the quick naïve fox " * 20_000
    ticks, done = list[float](), threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    def num_ticks(encode: Callable[[], Any]) -> tuple[Any, int]:
        started = time.perf_counter()
        encoded, ended = encode(), time.perf_counter()
        return encoded, sum(started < moment < ended for moment in list(ticks))

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        expected, none = num_ticks(lambda: tokenizer.encode(text))
        ids, some = num_ticks(lambda: codec(tokenizer).ids_of_text(text, add_special_tokens=True))
    finally:
        done.set()
        thread.join()
    assert ids == expected.ids and none <= 2 < 5 < some, (none, some)
