"""Prompts to token ids and back: one encode function, one decode function, and a stream that equals decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from reprlib import repr as short_repr
from typing import Any

from tokenizers import Tokenizer

from specrt.engines.errors import BundleError, UsageError
from specrt.engines.manifest import TokenizerEntry
from specrt.runtime.chat_template import compiled_template, plain_message
from specrt.runtime.detokenizer import TextStream, stage_makers

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]

PROMPT_KINDS = "a string, a list of messages or a list of token ids"


class TextCodec:
    """The target's tokenizer and chat template. Valid ids are below ``vocab_size``, the number of logits.

    ``names`` holds the tokens that the template may name, such as ``bos_token``. Raises ``UnsupportedModelError`` for
    a tokenizer whose decoder cannot be streamed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, template: str | None, names: Mapping[str, str]) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer, self._vocab_size, self._template, self._names = tokenizer, vocab_size, template, names
        self._special = frozenset(t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special)
        self._stage_makers = stage_makers(tokenizer)

    @classmethod
    def from_bundle(cls, bundle: Path, entry: TokenizerEntry, vocab_size: int) -> TextCodec:
        """The codec of a bundle folder. Raises ``BundleError`` when the tokenizer or the template cannot be read."""
        path = bundle / entry.file
        try:
            tokenizer = Tokenizer.from_file(str(path))
            path = bundle / (entry.chat_template or "")
            template = path.read_text(encoding="utf-8") if entry.chat_template else None
        except Exception as error:  # the binding of tokenizers raises the bare class
            raise BundleError(f"{path}: cannot be read ({error}); export the bundle again") from error
        names = {"bos_token": entry.bos_token, "eos_token": entry.eos_token}
        return cls(tokenizer, vocab_size, template, {name: token for name, token in names.items() if token is not None})

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, at least one; every path of specrt encodes here.

        A string gets the tokenizer's own special tokens. Messages go through the chat template, generation prompt
        added, and get no special tokens beyond those that the template writes. Ids are taken as they are. As in
        transformers, special tokens spelled out in a prompt or a message are parsed as such. Raises ``UsageError``
        for an empty prompt, one of another shape, and ids outside the vocabulary.
        """
        if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
            raise UsageError(f"prompt: got {type(prompt).__name__}, expected {PROMPT_KINDS}; convert it to one of them")
        if not prompt:
            ids = list[Any]()
        elif isinstance(prompt, str):
            ids = self._ids_of_text(prompt, add_special_tokens=True)
        elif any(isinstance(item, Mapping) for item in prompt):
            messages = [plain_message(item, index) for index, item in enumerate(prompt)]
            ids = self._ids_of_text(self._render(messages), add_special_tokens=False)
        else:
            ids = list(prompt)
        if not ids:
            raise UsageError(f"prompt: got no tokens, expected at least one; pass {PROMPT_KINDS} that is not empty")
        for index, token_id in enumerate(ids):
            is_integer = hasattr(token_id, "__index__") and not isinstance(token_id, bool)
            if not (is_integer and 0 <= token_id < self._vocab_size):
                raise UsageError(
                    f"prompt: token {index} is {short_repr(token_id)}, expected an id in 0..{self._vocab_size - 1}; "
                    "pass the text, or ids of the target's tokenizer"
                )
        return list(map(int, ids))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids`` without special tokens; ids that only pad the vocabulary have no text."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def stream(self) -> TextStream:
        """A new stream, for the ids of one output."""
        return TextStream(self._visible_token, [make() for make in self._stage_makers])

    def _visible_token(self, token_id: int) -> str | None:
        return None if (token := self._tokenizer.id_to_token(token_id)) in self._special else token

    def _ids_of_text(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError as error:
            raise UsageError("prompt: got half a surrogate pair, expected Unicode text; read it as UTF-8") from error

    def _render(self, messages: list[dict[str, Any]]) -> str:
        """What ``apply_chat_template`` of transformers makes of ``messages``, generation prompt added."""
        if self._template is None:
            raise UsageError("prompt: got messages, but the bundle has no chat template; pass the prompt as a string")
        variables = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return compiled_template(self._template).render(self._names, **variables)
        except Exception as error:  # a template is foreign code and may raise anything
            reason = " ".join(str(error).split())
            raise UsageError(
                f"chat template: {reason} ({type(error).__name__}); mend the messages or pass the prompt as a string"
            ) from error
