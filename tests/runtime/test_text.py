"""The joined stream equals the decode of all ids, templates render as in transformers, bad prompts get one line."""

from __future__ import annotations

from collections import UserDict
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from specrt.engines.errors import BundleError, UnsupportedModelError, UsageError
from specrt.engines.manifest import TokenizerEntry
from specrt.runtime.detokenizer import REPLACEMENT
from specrt.runtime.text import TextCodec
from specrt.tools.fetch import MODELS, models_home

CORPUS = ["the quick brown fox jumps over the lazy dog", "der schnelle braune Fuchs, naïve café", "你好，世界 😀 नमस्ते"]
BOS, EOS = "<s>", "</s>"
ADDED = "é"  # an added token that the byte-level decoder takes for the byte 0xE9
VOCAB_SIZE = 512  # as of a model whose embedding is padded
CHAT = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
HELLO = [{"role": "user", "content": "hello"}]

SPACE = decoders.Replace("▁", " ")
BYTES, FUSE, STRIP = decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
PIECE_DECODERS = {
    "llama": decoders.Sequence([SPACE, BYTES, FUSE, STRIP]),
    "gemma": decoders.Sequence([SPACE, BYTES, FUSE]),
    "metaspace": decoders.Metaspace(),
    "metaspace, never": decoders.Metaspace(prepend_scheme="never"),
    "metaspace after bytes": decoders.Sequence([BYTES, decoders.Metaspace(), FUSE]),
    "bytes after metaspace": decoders.Sequence([decoders.Metaspace(), BYTES, FUSE]),
    "strip each": decoders.Sequence([SPACE, STRIP, BYTES]),
    "strip two": decoders.Sequence([SPACE, FUSE, decoders.Strip(" ", 2, 0), STRIP]),
    "pattern": decoders.Sequence([decoders.Replace(Regex("[▁a]+"), "-"), FUSE]),
    "byte level of pieces": decoders.ByteLevel(),
    "none": None,
}


def codec(tokenizer: Tokenizer, template: str | None = None) -> TextCodec:
    return TextCodec(tokenizer, VOCAB_SIZE, template, {"bos_token": BOS, "eos_token": EOS})


@lru_cache
def byte_level() -> Tokenizer:
    """A byte-level BPE of about 400 tokens: most characters of other scripts take several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[BOS, EOS], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("two words", special=False), AddedToken(ADDED, special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


@lru_cache
def pieces(name: str) -> Tokenizer:
    """Sentencepiece-like: word pieces with ▁, all bytes, look-alikes of bytes, and an empty piece."""
    words = ["▁", "▁▁▁", "▁a", "a", "b▁", " ", "  c", "é", "你", REPLACEMENT, "", "<0xZZ>", "<0x+f>", "<0xé>", "<0x4>"]
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    tokenizer.add_special_tokens([BOS, EOS])
    if PIECE_DECODERS[name] is not None:
        tokenizer.decoder = PIECE_DECODERS[name]
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


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


def test_a_run_of_byte_tokens_is_judged_as_a_whole() -> None:
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


@lru_cache
def real_tokenizer(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    path = models_home() / name / MODELS[name].filename
    if not path.is_file():
        pytest.skip(f"{name} is not fetched")
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def real_codec(name: str) -> TextCodec:
    tokenizer = real_tokenizer(name)
    names = {key: tokenizer.special_tokens_map[key] for key in ("bos_token", "eos_token")}
    backend = tokenizer.backend_tokenizer
    return TextCodec(backend, backend.get_vocab_size(), tokenizer.chat_template, names)


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b", "gemma3-270m"])
@given(data=st.data())
def test_real_streams_equal_decode(name: str, data: st.DataObject) -> None:
    ids = data.draw(ids_of(real_tokenizer(name).backend_tokenizer))
    text_codec = real_codec(name)
    check_stream(text_codec, ids)
    assert text_codec.decode(ids) == real_tokenizer(name).decode(ids, skip_special_tokens=True)


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": HELLO,
    "system": [{"role": "system", "content": "Be brief."}, *HELLO],
    "turns": [*HELLO, {"role": "assistant", "content": "Hi <|im_end|> & 'you'"}, {"role": "user", "content": "naïve"}],
    "tool call": [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "é<"}}}]},
        {"role": "tool", "content": "42"},
    ],
}


@pytest.mark.model
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_real_templates_encode_as_in_transformers(name: str, messages: list[dict[str, Any]]) -> None:
    expected = real_tokenizer(name).apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert real_codec(name).encode(messages) == expected


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b", "gemma3-270m"])
@pytest.mark.parametrize("text", ["The  capital\n", "<|im_start|>user", "你好 😀"])
def test_real_texts_encode_as_in_transformers(name: str, text: str) -> None:
    assert real_codec(name).encode(text) == real_tokenizer(name)(text)["input_ids"]


TEMPLATES = {
    "plain": CHAT,
    "blocks": "  {% if true %}\n  kept\n  {% endif %}\nend\n",
    "generation": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ messages[0].content }}{% endgeneration %}{{ x }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ {'b': '<é>', 'a': 1} | tojson(indent=2, sort_keys=true) }}",
    "absent": "{{ pad_token }}|{{ tools is none }}|{{ documents is none }}|{{ add_generation_prompt }}",
    "date": "{{ strftime_now('%Y') }}",
    "keys": "{% for m in messages %}{{ m.keys() | list }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
}
RICH: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "<é> 'q'"}], "name": None},
    {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]},
    {"role": "assistant", "content": "yes", "thinking": "hm"},
    {"role": "assistant", "content": "no", "reasoning": "hm"},
]


@pytest.mark.parametrize("messages", [CONVERSATIONS["turns"], RICH], ids=["turns", "rich"])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_templates_render_as_in_transformers(template: str, messages: list[dict[str, Any]]) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), bos_token=BOS, eos_token=EOS)
    expected = reference.apply_chat_template(
        messages, chat_template=template, add_generation_prompt=True, return_dict=False
    )
    assert codec(byte_level(), template).encode(messages) == expected


def test_a_template_that_holds_bos_does_not_get_another() -> None:
    tokenizer = byte_level()
    bos = id_of(tokenizer, BOS)
    from_messages = codec(tokenizer, CHAT).encode(HELLO)
    assert (from_messages[0], from_messages.count(bos)) == (bos, 1)
    assert codec(tokenizer).encode("hello").count(bos) == 1
    assert codec(tokenizer).encode(from_messages) == from_messages


def test_truncation_and_padding_of_the_file_are_not_applied() -> None:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=99)
    assert codec(tokenizer).encode("hello there") == codec(byte_level()).encode("hello there")


def test_messages_and_ids_of_other_types_are_taken() -> None:
    np = pytest.importorskip("numpy")
    text_codec = codec(byte_level(), CHAT)
    assert text_codec.encode((UserDict(HELLO[0]),)) == text_codec.encode(HELLO)
    ids = text_codec.encode(list(np.array([3, 4])))
    assert (ids, {type(i) for i in ids}) == ([3, 4], {int})


EMPTY = (
    "prompt: got no tokens, expected at least one; "
    "pass a string, a list of messages or a list of token ids that is not empty"
)
KINDS = "expected a string, a list of messages or a list of token ids; convert it to one of them"
MESSAGE = "expected a role and a content; write it like {'role': 'user', 'content': 'text'}"
IDS = "pass the text, or ids of the target's tokenizer"
BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", EMPTY),
    ([], EMPTY),
    (None, f"prompt: got NoneType, {KINDS}"),
    (b"abc", f"prompt: got bytes, {KINDS}"),
    ({"role": "user"}, f"prompt: got dict, {KINDS}"),
    ("a\ud800", "prompt: got half a surrogate pair, expected Unicode text; read it as UTF-8"),
    ([1, -2], f"prompt: token 1 is -2, expected an id in 0..511; {IDS}"),
    ([512], f"prompt: token 0 is 512, expected an id in 0..511; {IDS}"),
    ([True], f"prompt: token 0 is True, expected an id in 0..511; {IDS}"),
    (["text"], f"prompt: token 0 is 'text', expected an id in 0..511; {IDS}"),
    ([1.0], f"prompt: token 0 is 1.0, expected an id in 0..511; {IDS}"),
    ([*HELLO, "hi"], f"prompt: message 1 is 'hi', {MESSAGE}"),
    ([{"content": "hi"}], f"prompt: message 0 is {{'content': 'hi'}}, {MESSAGE}"),
    ([{"role": "user"}], f"prompt: message 0 is {{'role': 'user'}}, {MESSAGE}"),
    ([{"role": 1, "content": "a"}], f"prompt: message 0 is {{'content': 'a', 'role': 1}}, {MESSAGE}"),
    ([{"role": "user", "content": 5}], f"prompt: message 0 is {{'content': 5, 'role': 'user'}}, {MESSAGE}"),
    ([{"role": "user", "content": [{1j}]}], f"prompt: message 0 is {{'content': [{{1j}}], 'role': 'user'}}, {MESSAGE}"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS, ids=range(len(BAD_PROMPTS)))
def test_a_bad_prompt_gets_one_line(prompt: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        codec(byte_level(), CHAT).encode(prompt)
    assert str(caught.value) == message


MEND = "mend the messages or pass the prompt as a string"
BAD_TEMPLATES = {
    "{{ raise_exception('no\n system') }}": f"chat template: no system (TemplateError); {MEND}",
    "{{ 1 + 'a' }}": f"chat template: unsupported operand type(s) for +: 'int' and 'str' (TypeError); {MEND}",
    "{% if %}": f"chat template: Expected an expression, got 'end of statement block' (TemplateSyntaxError); {MEND}",
    "{{ messages.append(1) }}": "chat template: access to attribute 'append' of 'list' object is unsafe. "
    f"(SecurityError); {MEND}",
    "{{ ''.__class__.__mro__ }}": "chat template: access to attribute '__class__' of 'str' object is unsafe. "
    f"(SecurityError); {MEND}",
    "": EMPTY,
}


@pytest.mark.parametrize("template", BAD_TEMPLATES)
def test_a_template_that_fails_gets_one_line(template: str) -> None:
    with pytest.raises(UsageError) as caught:
        codec(byte_level(), template).encode(HELLO)
    assert str(caught.value) == BAD_TEMPLATES[template]


def test_messages_without_a_template_are_refused() -> None:
    with pytest.raises(UsageError) as caught:
        codec(byte_level()).encode(HELLO)
    expected = "prompt: got messages, but the bundle has no chat template; pass the prompt as a string"
    assert str(caught.value) == expected


def test_a_bundle_gives_the_codec(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    byte_level().save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    (tmp_path / "tokenizer" / "chat.jinja").write_text(CHAT, encoding="utf-8")
    entry = TokenizerEntry("tokenizer/tokenizer.json", "tokenizer/chat.jinja", BOS, None)
    loaded = TextCodec.from_bundle(tmp_path, entry, vocab_size=512)
    assert loaded.encode(HELLO) == codec(byte_level(), CHAT).encode(HELLO)
    assert loaded.encode([511]) == [511]
    with pytest.raises(UsageError, match="bundle has no chat template"):
        TextCodec.from_bundle(tmp_path, TokenizerEntry(entry.file, None, None, None), 512).encode(HELLO)


@pytest.mark.parametrize("missing", ["tokenizer.json", "chat.jinja"])
def test_a_damaged_bundle_is_named(tmp_path: Path, missing: str) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat.jinja").write_text(CHAT, encoding="utf-8")
    (tmp_path / missing).unlink()
    with pytest.raises(BundleError, match=rf"{missing}: cannot be read \(.*\); export the bundle again$"):
        TextCodec.from_bundle(tmp_path, TokenizerEntry("tokenizer.json", "chat.jinja", BOS, EOS), 512)
