"""Tokenizers made here, of the kinds that models have, and those of real models where they are fetched."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from specrt.runtime.text.codec import TextCodec
from specrt.runtime.text.detokenizer import REPLACEMENT
from specrt.tools.lab.models import MODELS, models_home

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
    "word pieces": decoders.WordPiece("▁", True),
    "word pieces, not cleaned": decoders.WordPiece("▁", False),
    "word ends": decoders.BPEDecoder(suffix="▁"),
    "word ends and bytes": decoders.Sequence([BYTES, decoders.BPEDecoder(suffix="▁"), FUSE]),
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
