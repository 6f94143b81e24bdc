"""Prompts to token ids and back: one encode function, one decode function, and a stream with the same text."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from reprlib import repr as short_repr
from typing import Any

from tokenizers import Tokenizer

from specrt.engines.errors import BundleError, UsageError
from specrt.engines.manifest import TokenizerEntry
from specrt.runtime.text.chat_template import DEFAULT, ChatTemplates
from specrt.runtime.text.detokenizer import CLEANUP, TextStream, bytes_of_token, stage_makers
from specrt.runtime.text.messages import ChatOptions, is_message

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]

# Characters. ``encode`` keeps Python's lock, so that other threads wait; for longer texts that is more than 10 ms.
_LONG = 1 << 14

PROMPT_KINDS = "a string, a list of messages or a list of token ids"


class TextTooLongError(Exception):
    """A text of ``num_chars`` characters, more than the caller's limit. The caller says what is wrong with that.

    It is the text that would be encoded: of messages the one that the template writes.
    """

    def __init__(self, num_chars: int) -> None:
        super().__init__(num_chars)
        self.num_chars = num_chars


class TextCodec:
    """The target's tokenizer and chat templates. Valid ids are below ``vocab_size``, the number of logits.

    ``templates`` holds the chat templates by name, or is the only one. ``names`` are the special tokens that templates
    may use, such as ``bos_token``. With ``clean_up_spaces`` the text is cleaned as transformers does for WordPiece
    tokenizers. Raises ``UnsupportedModelError`` for a tokenizer whose decoder cannot be streamed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        templates: str | Mapping[str, str] | None,
        names: Mapping[str, str],
        clean_up_spaces: bool = False,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer, self._vocab_size, self._cleans_up = tokenizer, vocab_size, clean_up_spaces
        self._templates = ChatTemplates({DEFAULT: templates} if isinstance(templates, str) else templates or {}, names)
        self._special = frozenset(t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special)
        self._stage_makers = stage_makers(tokenizer, clean_up_spaces)

    @classmethod
    def from_bundle(cls, bundle: Path, entry: TokenizerEntry, vocab_size: int) -> TextCodec:
        """The codec of a bundle folder. Raises ``BundleError`` when the tokenizer or a template cannot be read."""
        path = bundle / entry.file
        templates = {}
        try:
            tokenizer = Tokenizer.from_file(str(path))
            for name, file in entry.templates.items():
                path = bundle / file
                templates[name] = path.read_text(encoding="utf-8")
        except Exception as error:  # tokenizers raises plain Exception
            raise BundleError(f"{path}: cannot be read ({error}); export the bundle again") from error
        return cls(tokenizer, vocab_size, templates, entry.special_tokens, entry.clean_up_spaces)

    def encode(
        self, prompt: Prompt, chat: ChatOptions | None = None, max_encoded_chars: int | None = None
    ) -> list[int]:
        """The token ids of a prompt, at least one. All of specrt encodes with this function.

        A string gets the tokenizer's special tokens. Messages go through the chat template with options ``chat``, and
        get no special tokens beyond those that the template writes. Ids are used unchanged. As in transformers,
        special tokens spelled out in a prompt or a message are parsed as such. Raises ``UsageError`` for an empty
        prompt, a wrong type, ids outside the vocabulary, and chat template options if the prompt is not messages, and
        ``TextTooLongError`` for a text of more than ``max_encoded_chars``, of messages after the template, before it is
        encoded.
        """
        if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
            raise UsageError(f"prompt: got {type(prompt).__name__}, expected {PROMPT_KINDS}; convert it to one of them")
        is_known = self._are_valid(prompt)  # seen at once, since a long prompt has many ids
        is_chat = not isinstance(prompt, str) and not is_known and any(map(is_message, prompt))
        if chat is not None and chat.given and not is_chat:
            raise UsageError(f"{chat.given}: only for lists of messages, got another kind of prompt; leave it out")
        if not prompt:
            ids = list[Any]()
        elif isinstance(prompt, str):
            ids = self.ids_of_text(_limited(prompt, max_encoded_chars), add_special_tokens=True)
        elif is_chat:
            ids = self.ids_of_text(_limited(self.render(prompt, chat), max_encoded_chars), add_special_tokens=False)
        else:
            ids = list(prompt)
        if not ids:
            raise UsageError(f"prompt: got no tokens, expected at least one; pass {PROMPT_KINDS} that is not empty")
        if is_known or self._are_valid(ids):
            return ids
        for index, token_id in enumerate(ids):
            is_integer = hasattr(token_id, "__index__") and not isinstance(token_id, bool)
            if not (is_integer and 0 <= token_id < self._vocab_size):
                raise UsageError(
                    f"prompt: token {index} is {short_repr(token_id)}, expected an id in 0..{self._vocab_size - 1}; "
                    "pass the text, or ids of the target's tokenizer"
                )
        return list(map(int, ids))

    def _are_valid(self, ids: Sequence[Any]) -> bool:
        """Whether ``ids`` are plain integers, at least one, in the vocabulary."""
        return set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < self._vocab_size

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids`` without special tokens. Ids that pad the vocabulary have no text."""
        text = str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
        for old, new in CLEANUP if self._cleans_up else ():
            text = text.replace(old, new)
        return text

    def stream(self, visible: Collection[str] = ()) -> TextStream:
        """A new stream, for the ids of one output. Only the ``visible`` special tokens have text."""
        hidden = self._special.difference(visible)

        def token_of(token_id: int) -> str | None:
            return None if (token := self._tokenizer.id_to_token(token_id)) in hidden else token

        return TextStream(token_of, [make() for make in self._stage_makers])

    def token_bytes(self, token_id: int) -> bytes:
        """The text of one token in UTF-8: for a special token its name, for a part of a character its bytes."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token in self._special:
            return str(token).encode()
        if (data := bytes_of_token(token, self._stage_makers)) is not None:
            return data
        alone, twice = self.decode([token_id]), self.decode([token_id] * 2)
        return (twice.removeprefix(alone) or alone).encode()  # the first token of a text may lose its space

    @cached_property
    def max_token_chars(self) -> int:
        """Characters of the longest token, or somewhat more: a text has at least its length over this in tokens."""
        return max(map(len, self._tokenizer.get_vocab()))

    @property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens, which have no text, by name."""
        return {t.content: i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}

    @property
    def is_joined(self) -> bool:
        """Whether a text is the bytes of its tokens, joined, except for a space at its start."""
        if self._cleans_up or self._tokenizer.decoder is None:
            return False
        spec = json.loads(self._tokenizer.decoder.__getstate__())
        return not {part["type"] for part in spec.get("decoders", [spec])} & {"WordPiece", "BPEDecoder"}

    def ids_of_text(self, text: str, add_special_tokens: bool) -> list[int]:
        """The ids of a text, none for an empty one. Raises ``UsageError`` for an unpaired surrogate."""
        try:
            if len(text) > _LONG:
                return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError as error:
            raise UsageError("prompt: got half a surrogate pair, expected Unicode text; read it as UTF-8") from error

    def render(self, messages: Sequence[Any], chat: ChatOptions | None = None) -> str:
        """The text of ``messages`` as of transformers' ``apply_chat_template``, by default with a generation prompt."""
        return self._templates.render(messages, chat or ChatOptions())

    def template(self, chat: ChatOptions) -> str:
        """The source of the chat template that ``chat`` selects. Raises ``UsageError`` if there is none."""
        return self._templates.source(chat)


def _limited(text: str, max_chars: int | None) -> str:
    if max_chars is not None and len(text) > max_chars:
        raise TextTooLongError(len(text))
    return text
