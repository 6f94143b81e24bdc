"""The tokenizer of a GGUF file, built by transformers' converter and corrected by the keys that it ignores.

The converter ignores ``add_space_prefix``, names of pre-tokenizers that it does not know, ``ignore_merges`` and the
defaults that llama.cpp ties to a pre-tokenizer's name, and chat templates other than the default one.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    GGUF_TOKENIZER_MAPPING,
    convert_gguf_tokenizer,
)
from transformers.integrations.gguf.reader import read_gguf_metadata

from specrt.engines.errors import SourceError, UnsupportedModelError
from specrt.exporter.sources.gguf.file import GgufFile, Strings

_PREFIX = "tokenizer."
_ELSEWHERE = "export the model from its Hugging Face folder instead"
_NO_ID = 2**32 - 1  # how a file writes -1, "none"
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"
_SENTENCEPIECE_IDS = {"ggml.bos_token_id": 1, "ggml.eos_token_id": 2}  # llama.cpp's, where the file has none
_END_KEYS = ("ggml.eos_token_id", "ggml.eot_token_id", "ggml.eom_token_id")

_READ = frozenset(
    ["chat_template", "chat_templates", *_END_KEYS]
    + [f"ggml.{name}" for name in ("model", "pre", "tokens", "token_type", "scores", "merges")]
    + [f"ggml.{name}" for name in ("bos_token_id", "unknown_token_id", "padding_token_id")]
    + [f"ggml.{name}" for name in ("add_bos_token", "add_eos_token", "add_space_prefix")]
)
# Keys that have no effect on tokens or text, and why.
_HARMLESS = {
    "ggml.seperator_token_id": "added to no text",
    "ggml.mask_token_id": "added to no text",
    "ggml.cls_token_id": "added to no text",
    **{f"ggml.fim_{name}_token_id": "for infilling only" for name in ("pre", "suf", "mid", "pad", "rep", "sep")},
    **{f"ggml.{name}_token_id": "for infilling only" for name in ("prefix", "suffix", "middle")},
    "ggml.remove_extra_whitespaces": "of unigram vocabularies, which are refused",
    "ggml.precompiled_charsmap": "of unigram vocabularies, which are refused",
    "huggingface.json": "the same vocabulary in another form",
}

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # GPT-2's
_DIGITS = (r"\p{N}", _WORDS)
_QWEN2 = (GGUF_PRE_TOKENIZER_SPLITS["qwen2"],)
_UNNAMED = (r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")
# How text is split before merges, by ``tokenizer.ggml.pre``; transformers' own rows are added to these.
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"), (_WORDS,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("stablelm2", "hunyuan"), _QWEN2),
    "default": _UNNAMED,
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    **{name: (split,) for name, split in GGUF_PRE_TOKENIZER_SPLITS.items()},
}
# With these, a word of the vocabulary is not merged from parts, and a text begins with BOS unless the file states not.
_WHOLE_WORDS = frozenset(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken")
)


def special_ids(gguf: GgufFile, vocab_size: int) -> dict[str, Any]:
    """``bos_token_id``, ``pad_token_id`` and all of ``eos_token_id`` for the config.

    The ends are the ids under the keys eos, eot and eom. llama.cpp also ends at tokens that are *spelled* like an end
    (<|im_end|>, <|endoftext|>); here only what the file states counts, so that a model ends alike in both formats.
    Raises ``SourceError`` for an id outside the vocabulary.
    """
    ends = {_id(gguf, key, vocab_size) for key in _END_KEYS} - {None}
    return {
        "bos_token_id": _id(gguf, "ggml.bos_token_id", vocab_size),
        "pad_token_id": _id(gguf, "ggml.padding_token_id", vocab_size),
        "eos_token_id": sorted(ends) if len(ends) > 1 else next(iter(ends), None),
    }


def _id(gguf: GgufFile, name: str, vocab_size: int) -> int | None:
    key = f"{_PREFIX}{name}"
    value = gguf.metadata.get(key)
    if value is None:
        is_sentencepiece = gguf.metadata.get("tokenizer.ggml.model") == SENTENCEPIECE
        default = _SENTENCEPIECE_IDS.get(name, vocab_size) if is_sentencepiece else vocab_size
        return default if default < vocab_size else None
    if isinstance(value, bool) or not isinstance(value, int):
        raise SourceError(f"{gguf.path}: {key} is {value!r}, expected a token id; convert the model again")
    if value in (_NO_ID, -1):
        return None
    if not 0 <= value < vocab_size:
        raise SourceError(
            f"{gguf.path}: {key} is {value}, outside the vocabulary of {vocab_size} ids; convert it again"
        )
    return value


def tokenizer_from_gguf(gguf: GgufFile) -> Any:
    """The fast transformers tokenizer that ``gguf`` describes.

    Raises ``UnsupportedModelError`` for a key or a kind that cannot be honoured, ``SourceError`` for damage.
    """
    _check_keys(gguf)
    stated, _ = read_gguf_metadata(str(gguf.path), ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"))
    parts = {
        name: stated[f"{_PREFIX}{key}"]
        for key, name in GGUF_TOKENIZER_MAPPING["tokenizer"].items()
        if f"{_PREFIX}{key}" in stated
    }
    backend, _ = convert_gguf_tokenizer(gguf.architecture, parts)
    is_byte_level = parts["tokenizer_type"] == BYTE_LEVEL
    (_correct_byte_level if is_byte_level else _correct_sentencepiece)(gguf, backend)
    tokens = parts["tokens"]
    ids = special_ids(gguf, len(tokens))
    named = {"bos_token": ids["bos_token_id"], "pad_token": ids["pad_token_id"]}
    named["eos_token"] = _id(gguf, "ggml.eos_token_id", len(tokens))
    named["unk_token"] = _id(gguf, "ggml.unknown_token_id", len(tokens))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        add_bos_token=_flag(gguf, "ggml.add_bos_token", not is_byte_level or _pre(gguf) in _WHOLE_WORDS),
        add_eos_token=_flag(gguf, "ggml.add_eos_token", False),
        chat_template=_chat_template(gguf),
        **{name: None if token_id is None else tokens[token_id] for name, token_id in named.items()},
    )


def _check_keys(gguf: GgufFile) -> None:
    for key, value in gguf.metadata.items():
        name = key.removeprefix(_PREFIX)
        if name == key or name in _READ or name in _HARMLESS or name.startswith("chat_template."):
            continue
        if value is False or value == 0:
            continue  # a feature that is switched off
        raise UnsupportedModelError(
            f"{gguf.path}: the metadata key {key} (here {str(value)[:40]}) is not known, and may change how text "
            f"becomes tokens; {_ELSEWHERE}"
        )
    kind = gguf.metadata.get("tokenizer.ggml.model")
    if kind not in (BYTE_LEVEL, SENTENCEPIECE):
        raise UnsupportedModelError(
            f"{gguf.path}: tokenizer.ggml.model is {kind!r}, expected 'gpt2' or 'llama'; {_ELSEWHERE}"
        )
    if not isinstance(gguf.metadata.get("tokenizer.ggml.tokens"), Strings):
        raise SourceError(f"{gguf.path}: tokenizer.ggml.tokens is missing; convert the model with its vocabulary")


def _flag(gguf: GgufFile, key: str, default: bool) -> bool:
    value = gguf.metadata.get(f"{_PREFIX}{key}", default)
    if value not in (True, False):
        raise SourceError(f"{gguf.path}: {_PREFIX}{key} is {value!r}, expected a boolean; convert the model again")
    return bool(value)


def _pre(gguf: GgufFile) -> str:
    return str(gguf.metadata.get("tokenizer.ggml.pre", "default"))


def _correct_byte_level(gguf: GgufFile, backend: Tokenizer) -> None:
    """Split text as the named pre-tokenizer does. ``add_space_prefix`` does not apply to these vocabularies."""
    splits = _SPLITS.get(_pre(gguf))
    if splits is None:
        raise UnsupportedModelError(
            f"{gguf.path}: tokenizer.ggml.pre is {_pre(gguf)!r}, and how it splits text is not known; {_ELSEWHERE}"
        )
    parts = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in splits]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*parts, byte_level])
    if _pre(gguf) in _WHOLE_WORDS:
        backend.model.ignore_merges = True


def _correct_sentencepiece(gguf: GgufFile, backend: Tokenizer) -> None:
    """Remove the space that is put before a text, if the file states so."""
    text = backend.normalizer.normalize_str("a") if backend.normalizer else "a"
    pieces = backend.pre_tokenizer.pre_tokenize_str(text) if backend.pre_tokenizer else [(text, (0, 1))]
    is_put = pieces[0][0].startswith("▁")
    is_wanted = _flag(gguf, "ggml.add_space_prefix", is_put)
    if is_put == is_wanted:
        return
    if is_wanted:
        raise UnsupportedModelError(
            f"{gguf.path}: tokenizer.ggml.add_space_prefix is true, and {gguf.architecture} tokenizers have no such "
            f"space; {_ELSEWHERE}"
        )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = None
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def _chat_template(gguf: GgufFile) -> str | dict[str, str] | None:
    """The default template, or all by name when there are others, as transformers holds them."""
    default = gguf.metadata.get("tokenizer.chat_template")
    named = {
        key.removeprefix("tokenizer.chat_template."): value
        for key, value in gguf.metadata.items()
        if key.startswith("tokenizer.chat_template.")
    }
    for name, template in {"chat_template": default, **named}.items():
        if template is not None and not isinstance(template, str):
            raise SourceError(
                f"{gguf.path}: the template {name} is {template!r}, expected text; convert the model again"
            )
    if not named:
        return default
    return named if default is None else {"default": default, **named}
