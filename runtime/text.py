"""Prompts to token ids and back: one encode function, one decode function, and a stream that equals decode."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from reprlib import repr as short_repr
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, decoders

from specrt.engines.errors import BundleError, UnsupportedModelError, UsageError
from specrt.engines.manifest import TokenizerEntry

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]

PROMPT_KINDS = "a string, a list of messages or a list of token ids"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


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
        self._stage_makers = _stage_makers(tokenizer)

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
            messages = [_plain_message(item, index) for index, item in enumerate(prompt)]
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
            return _compiled(self._template).render(self._names, **variables)
        except Exception as error:  # a template is foreign code and may raise anything
            reason = " ".join(str(error).split())
            raise UsageError(
                f"chat template: {reason} ({type(error).__name__}); mend the messages or pass the prompt as a string"
            ) from error


class TextStream:
    """Text of ids that come one by one: the joined pushes and the flush equal ``TextCodec.decode`` of all the ids.

    A push costs the same however long the text is and never returns part of a character: the bytes of an unfinished
    one are held. With byte fallback, a run of byte tokens is held until it ends or breaks: one bad byte spoils it all.
    """

    def __init__(self, token_of: Callable[[int], str | None], stages: Sequence[_Stage]) -> None:
        self._token_of, self._stages = token_of, stages

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` makes final."""
        token = self._token_of(token_id)
        return "" if token is None else self._feed(0, (token,))

    def flush(self) -> str:
        """The text still held; ends the stream."""
        return "".join(self._feed(index + 1, stage.close()) for index, stage in enumerate(self._stages))

    def _feed(self, first: int, tokens: Iterable[str]) -> str:
        for stage in self._stages[first:]:
            tokens = [text for token in tokens for text in stage.push(token)]
        return "".join(tokens)


class _Stage:
    """A decoder of ``tokenizers`` as a state machine: tokens in, final tokens out. This one maps them one by one."""

    def __init__(self, rest: Callable[[str], str] = str, first: Callable[[str], str] | None = None) -> None:
        self._map, self._rest = first or rest, rest

    def push(self, token: str) -> tuple[str, ...]:
        text, self._map = self._map(token), self._rest
        return (text,)

    def close(self) -> tuple[str, ...]:
        return ()


class _StripStart(_Stage):
    """``Strip`` at the start of text that is one token (after ``Fuse``) and comes in pieces."""

    def __init__(self, part: Mapping[str, Any]) -> None:
        self._content, self._left = part["content"], part["start"]

    def push(self, token: str) -> tuple[str, ...]:
        cut = min(self._left, len(token) - len(token.lstrip(self._content)))
        self._left = self._left - cut if cut == len(token) else 0
        return (token[cut:],)


_PLAIN_BYTES = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHER_BYTES = sorted(set(range(256)) - set(_PLAIN_BYTES))
_BYTE_OF_CHAR = {chr(b): b for b in _PLAIN_BYTES} | {chr(256 + i): b for i, b in enumerate(_OTHER_BYTES)}


class _ByteLevel(_Stage):
    """``ByteLevel``: each character of a token is a byte; a token with other characters stands for its own UTF-8."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str) -> tuple[str, ...]:
        known = _BYTE_OF_CHAR.keys() >= set(token)
        return (self._utf8.decode(bytes(map(_BYTE_OF_CHAR.__getitem__, token)) if known else token.encode()),)

    def close(self) -> tuple[str, ...]:
        return (self._utf8.decode(b"", final=True),)


class _ByteFallback(_Stage):
    """``ByteFallback``: a run of tokens ``<0xNN>`` is text if all of it is UTF-8, else one U+FFFD for each byte."""

    _BYTE = re.compile("<0x([0-9A-Fa-f+][0-9A-Fa-f])>")

    def __init__(self) -> None:
        self._run, self._broken = bytearray(), False
        self._utf8 = codecs.getincrementaldecoder("utf-8")()

    def push(self, token: str) -> tuple[str, ...]:
        match = self._BYTE.fullmatch(token)
        if match is None:
            return (*self.close(), token)
        return (REPLACEMENT,) if self._broken else self._judge(bytes((int(match[1], 16),)))

    def _judge(self, data: bytes, final: bool = False) -> tuple[str, ...]:
        self._run += data
        try:
            self._utf8.decode(data, final)
        except UnicodeDecodeError:
            self._broken = True
            return (REPLACEMENT,) * len(self._run)
        return (self._run.decode(),) if final and self._run else ()

    def close(self) -> tuple[str, ...]:
        tokens = () if self._broken else self._judge(b"", final=True)
        _ByteFallback.__init__(self)
        return tokens


def _mapped(part: Mapping[str, Any]) -> _Stage:
    """A stage that asks ``tokenizers`` itself; only ``Metaspace`` treats the first token in another way."""
    decoder = decoders.Fuse()
    decoder.__setstate__(json.dumps(part).encode())
    before = [""] if part["type"] == "Metaspace" else []
    return _Stage(lambda token: decoder.decode([*before, token]), first=lambda token: decoder.decode([token]))


_STAGES: dict[str, Callable[[Mapping[str, Any]], _Stage]] = {
    **dict.fromkeys(("Replace", "Strip", "Metaspace"), _mapped),
    "ByteFallback": lambda part: _ByteFallback(),
    "ByteLevel": lambda part: _ByteLevel(),
    "Fuse": lambda part: _Stage(),
}


def _stage_makers(tokenizer: Tokenizer) -> list[Callable[[], _Stage]]:
    """A maker for each part of the tokenizer's decoder; from ``ByteLevel`` or ``Fuse`` on, a part sees all the text."""
    if tokenizer.decoder is None:
        return [partial(_Stage, " {}".format, first=str)]
    spec = json.loads(tokenizer.decoder.__getstate__())
    makers, fused = list[Callable[[], _Stage]](), False
    for part in spec.get("decoders", [spec]):
        kind = part["type"]
        if kind not in _STAGES or (fused and (kind not in ("Strip", "Fuse") or part.get("stop"))):
            raise UnsupportedModelError(
                f"tokenizer: decoder {kind} cannot be streamed there, expected {', '.join(_STAGES)}; pick another model"
            )
        makers.append(partial(_StripStart if fused and kind == "Strip" else _STAGES[kind], part))
        fused = fused or kind in ("ByteLevel", "Fuse")
    return makers


def _plain_message(item: Any, index: int) -> dict[str, Any]:
    """A message as plain JSON data, without keys of value None; reasoning under each name that templates read."""
    try:
        message = json.loads(json.dumps({key: value for key, value in item.items() if value is not None}))
        body = message.get("content", message.get("tool_calls"))
        if not (isinstance(message["role"], str) and isinstance(body, str | list)):
            raise TypeError
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"prompt: message {index} is {short_repr(item)}, expected a role and a content; "
            "write it like {'role': 'user', 'content': 'text'}"
        ) from error
    for name in ("reasoning_content", "thinking", "reasoning"):
        if name in message:
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return dict(message)


class _GenerationBlocks(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it renders its body, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


@lru_cache
def _compiled(source: str) -> Template:
    """A chat template in the sandbox, with the settings, the filter and the functions that transformers gives it."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=raise_exception, strftime_now=lambda form: datetime.now().strftime(form))
    return environment.from_string(source)
