"""Prompts become ids: texts and templates as in transformers; bad ones, and damaged bundles, get one line."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from specrt.engines.errors import BundleError, UsageError
from specrt.engines.manifest import TokenizerEntry
from specrt.runtime.text.codec import TextCodec
from tests.runtime.text.tokenizers_made import (
    BOS,
    CHAT,
    EOS,
    HELLO,
    byte_level,
    codec,
    id_of,
    real_codec,
    real_tokenizer,
)

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


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_real_templates_encode_as_in_transformers(name: str, messages: list[dict[str, Any]]) -> None:
    expected = real_tokenizer(name).apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert real_codec(name).encode(messages) == expected


@pytest.mark.slow
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


FIX = "change the messages, or pass plain text (--raw)"
BAD_TEMPLATES = {
    "{{ raise_exception('no\n system') }}": f"chat template: no system (TemplateError); {FIX}",
    "{{ 1 + 'a' }}": f"chat template: unsupported operand type(s) for +: 'int' and 'str' (TypeError); {FIX}",
    "{% if %}": f"chat template: Expected an expression, got 'end of statement block' (TemplateSyntaxError); {FIX}",
    "{{ messages.append(1) }}": "chat template: access to attribute 'append' of 'list' object is unsafe. "
    f"(SecurityError); {FIX}",
    "{{ ''.__class__.__mro__ }}": "chat template: access to attribute '__class__' of 'str' object is unsafe. "
    f"(SecurityError); {FIX}",
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
    entry = TokenizerEntry("tokenizer/tokenizer.json", "tokenizer/chat.jinja", {"bos_token": BOS}, {}, False)
    loaded = TextCodec.from_bundle(tmp_path, entry, vocab_size=512)
    assert loaded.encode(HELLO) == codec(byte_level(), CHAT).encode(HELLO)
    assert loaded.encode([511]) == [511]
    with pytest.raises(UsageError, match="bundle has no chat template"):
        TextCodec.from_bundle(tmp_path, TokenizerEntry(entry.file, None, {}, {}, False), 512).encode(HELLO)


@pytest.mark.parametrize("missing", ["tokenizer.json", "chat.jinja"])
def test_a_damaged_bundle_is_named(tmp_path: Path, missing: str) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat.jinja").write_text(CHAT, encoding="utf-8")
    (tmp_path / missing).unlink()
    with pytest.raises(BundleError, match=rf"{missing}: cannot be read \(.*\); export the bundle again$"):
        TextCodec.from_bundle(
            tmp_path,
            TokenizerEntry("tokenizer.json", "chat.jinja", {"bos_token": BOS, "eos_token": EOS}, {}, False),
            512,
        )
