"""The tokenizer of a GGUF file: as transformers builds it, and what its builder leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from specrt.engines.errors import SourceError, UnsupportedModelError
from specrt.exporter.sources.gguf.file import read_gguf
from specrt.exporter.sources.gguf.tokens import tokenizer_from_gguf
from specrt.exporter.sources.source import find_source
from tests.exporter.sources.gguf.gguf_files import config_of, model_of, write_gguf
from tests.tiny import tiny_tokenizer

TEXTS = (
    "The quick brown fox, 1969  7",
    " def area(radius):\n    return 3",
    "naïve 你好 🙂",
    "<|im_start|>user\nHi<|im_end|>",
)


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of(config_of("llama"))


def tokenizer_of(path: Path, model: Any, **others: Any) -> Any:
    keys = {f"tokenizer.{name.replace('__', '.')}": value for name, value in others.items()}
    return tokenizer_from_gguf(read_gguf(write_gguf(path / "model.gguf", model, others=keys)))


def sentencepiece(**others: Any) -> dict[str, Any]:
    """A vocabulary of characters and of some joined ones, with their scores."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdehlorw", "▁a", "he", "▁he"]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces) - 259)]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 259)
    return {
        "ggml__model": "llama", "ggml__pre": "default", "ggml__tokens": pieces, "ggml__scores": scores,
        "ggml__token_type": kinds, "ggml__merges": None, "ggml__bos_token_id": 1, "ggml__eos_token_id": 2,
        "ggml__unknown_token_id": 0, **others,
    }  # fmt: skip


def test_it_is_the_tokenizer_that_was_written(model: Any, tmp_path: Path) -> None:
    tokenizer, expected = tokenizer_of(tmp_path, model), tiny_tokenizer()
    assert [tokenizer.encode(text) for text in TEXTS] == [expected.encode(text) for text in TEXTS]
    assert [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS] == list(TEXTS)
    assert (tokenizer.bos_token, tokenizer.eos_token) == (expected.bos_token, expected.eos_token)
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == expected.apply_chat_template(
        messages, tokenize=False
    )


def test_files_next_to_a_gguf_file_are_not_its_own(model: Any, tmp_path: Path) -> None:
    """transformers takes a tokenizer.json in the same folder for the file's tokenizer."""
    path = write_gguf(tmp_path / "model.gguf", model)
    expected = find_source(str(path)).tokenizer.encode(TEXTS[0])
    tiny_tokenizer(300).save_pretrained(tmp_path)
    assert find_source(str(path)).tokenizer.encode(TEXTS[0]) == expected
    assert AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf").encode(TEXTS[0]) != expected


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["ab", "Ġ", "Ġ1969", "\u010a"]),
        ("smollm", ["ab", "ĠĠ", "1", "9", "6", "9", "\u010a"]),
        ("qwen2", ["ab", "Ġ", "Ġ", "1", "9", "6", "9", "\u010a"]),
        ("llama-bpe", ["ab", "Ġ", "Ġ", "196", "9", "\u010a"]),
        ("default", ["ab", "Ġ", "Ġ", "196", "9", "\u010a"]),
    ],
)
def test_text_is_split_by_the_name_of_the_pre_tokenizer(
    pre: str, pieces: list[str], model: Any, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(tmp_path, model, ggml__pre=pre)
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("ab  1969\n")
    assert [piece for piece, _ in split] == pieces


@pytest.mark.parametrize(
    ("keys", "begins"),
    [
        ({}, False),
        ({"ggml__add_bos_token": True}, True),
        ({"ggml__pre": "llama-bpe"}, True),  # llama.cpp's default for this name
        ({"ggml__pre": "llama-bpe", "ggml__add_bos_token": False}, False),
        ({"ggml__pre": "qwen2"}, False),
    ],
)
def test_a_text_begins_with_bos_when_the_file_sets_it(
    keys: dict[str, Any], begins: bool, model: Any, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(tmp_path, model, **keys)
    assert (tokenizer.encode("ab")[0] == tokenizer.bos_token_id) is begins


@pytest.mark.parametrize(
    ("keys", "ids"),
    [
        ({}, ["<s>", "▁he", "l", "l", "o"]),
        ({"ggml__add_space_prefix": True}, ["<s>", "▁he", "l", "l", "o"]),
        ({"ggml__add_space_prefix": False}, ["<s>", "he", "l", "l", "o"]),
        ({"ggml__add_bos_token": False}, ["▁he", "l", "l", "o"]),
    ],
)
def test_the_space_before_a_sentencepiece_text(
    keys: dict[str, Any], ids: list[str], model: Any, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(tmp_path, model, **sentencepiece(**keys))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("hello")) == ids
    assert tokenizer.decode(tokenizer.encode("hello a"), skip_special_tokens=True) == "hello a"


def test_all_templates_are_kept_by_name(model: Any, tmp_path: Path) -> None:
    default = tiny_tokenizer().chat_template
    named = tokenizer_of(tmp_path, model, **{"chat_template__tool_use": "tools", "chat_templates": ["tool_use"]})
    assert named.chat_template == {"default": default, "tool_use": "tools"}
    alone = tokenizer_of(tmp_path, model, **{"chat_template": None, "chat_template__rag": "documents"})
    assert alone.chat_template == {"rag": "documents"}


@pytest.mark.parametrize(
    ("keys", "error", "line"),
    [
        ({"ggml__add_bos_token": 3}, SourceError, "add_bos_token is 3, expected a boolean"),
        ({"chat_template": 7}, SourceError, "chat_template is 7, expected text"),
        ({"ggml__bos_token_id": 320}, SourceError, "bos_token_id is 320, outside the vocabulary"),
        ({"ggml__add_sep_token": True}, UnsupportedModelError, "tokenizer.ggml.add_sep_token"),
    ],
)
def test_a_key_that_cannot_be_honoured_is_refused(
    keys: dict[str, Any], error: type[Exception], line: str, model: Any, tmp_path: Path
) -> None:
    with pytest.raises(error, match=line):
        tokenizer_of(tmp_path, model, **keys)
