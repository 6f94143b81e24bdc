"""Token ids to text one by one: each decoder of ``tokenizers`` as a state machine with constant cost per token.

Decoding a window of the last ids would be simpler but wrong: with byte fallback, an invalid byte also changes the text
of valid bytes before it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from tokenizers import Tokenizer, decoders

from specrt.engines.errors import UnsupportedModelError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Text of ids that come one by one. All pushes and the flush, joined, equal ``TextCodec.decode`` of all ids.

    The cost of a push does not depend on the length of the text. A push never returns part of a character: the bytes
    of an incomplete one are held. With byte fallback, a run of byte tokens is held until it ends or is invalid, since
    one invalid byte makes the whole run invalid.
    """

    def __init__(self, token_of: Callable[[int], str | None], stages: Sequence[Stage]) -> None:
        self._token_of, self._stages = token_of, stages

    def push(self, token_id: int) -> str:
        """Add a token; return the text that becomes final."""
        token = self._token_of(token_id)
        return "" if token is None else self._feed(0, (token,))

    def flush(self) -> str:
        """End the stream; return the text still held."""
        return "".join(self._feed(index + 1, stage.close()) for index, stage in enumerate(self._stages))

    def _feed(self, first: int, tokens: Iterable[str]) -> str:
        for stage in self._stages[first:]:
            tokens = [text for token in tokens for text in stage.push(token)]
        return "".join(tokens)


class Stage:
    """A decoder of ``tokenizers`` as a state machine: tokens in, final tokens out. The base class maps each token."""

    def __init__(self, rest: Callable[[str], str] = str, first: Callable[[str], str] | None = None) -> None:
        self._map, self._rest = first or rest, rest

    def push(self, token: str) -> tuple[str, ...]:
        text, self._map = self._map(token), self._rest
        return (text,)

    def close(self) -> tuple[str, ...]:
        return ()


class _StripStart(Stage):
    """``Strip`` at the start of a text that is one token (after ``Fuse``) and comes in pieces."""

    def __init__(self, part: Mapping[str, Any]) -> None:
        self._content, self._left = part["content"], part["start"]

    def push(self, token: str) -> tuple[str, ...]:
        cut = min(self._left, len(token) - len(token.lstrip(self._content)))
        self._left = self._left - cut if cut == len(token) else 0
        return (token[cut:],)


_PLAIN_BYTES = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHER_BYTES = sorted(set(range(256)) - set(_PLAIN_BYTES))
_BYTE_OF_CHAR = {chr(b): b for b in _PLAIN_BYTES} | {chr(256 + i): b for i, b in enumerate(_OTHER_BYTES)}


class _ByteLevel(Stage):
    """``ByteLevel``: each character of a token is a byte; a token with other characters stands for its own UTF-8."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str) -> tuple[str, ...]:
        known = _BYTE_OF_CHAR.keys() >= set(token)
        return (self._utf8.decode(bytes(map(_BYTE_OF_CHAR.__getitem__, token)) if known else token.encode()),)

    def close(self) -> tuple[str, ...]:
        return (self._utf8.decode(b"", final=True),)


class _ByteFallback(Stage):
    """``ByteFallback``: a run of tokens ``<0xNN>`` is text if all of it is UTF-8, else one U+FFFD for each byte."""

    _BYTE = re.compile("<0x([0-9A-Fa-f+][0-9A-Fa-f])>")

    def __init__(self) -> None:
        self._run, self._broken = bytearray(), False
        self._utf8 = codecs.getincrementaldecoder("utf-8")()

    def push(self, token: str) -> tuple[str, ...]:
        match = self._BYTE.fullmatch(token)
        if match is None:
            return (*self.close(), token)
        return (REPLACEMENT,) if self._broken else self._decoded(bytes((int(match[1], 16),)))

    def _decoded(self, data: bytes, final: bool = False) -> tuple[str, ...]:
        self._run += data
        try:
            self._utf8.decode(data, final)
        except UnicodeDecodeError:
            self._broken = True
            return (REPLACEMENT,) * len(self._run)
        return (self._run.decode(),) if final and self._run else ()

    def close(self) -> tuple[str, ...]:
        tokens = () if self._broken else self._decoded(b"", final=True)
        _ByteFallback.__init__(self)
        return tokens


class _SuffixedWords(Stage):
    """``BPEDecoder``: a token's suffix becomes a space, or is dropped at the end of the text: one token is held."""

    def __init__(self, part: Mapping[str, Any]) -> None:
        self._suffix, self._held = part["suffix"], list[str]()

    def push(self, token: str) -> tuple[str, ...]:
        done = tuple(held.replace(self._suffix, " ") for held in self._held)
        self._held = [token]
        return done

    def close(self) -> tuple[str, ...]:
        return tuple(held.replace(self._suffix, "") for held in self._held)


class _Substitution(Stage):
    """``str.replace`` on text that comes in pieces. The end is held while it may be the start of an occurrence."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new, self._held = old, new, ""

    def push(self, token: str) -> tuple[str, ...]:
        *done, rest = (self._held + token).split(self._old)
        sizes = range(min(len(self._old) - 1, len(rest)), 0, -1)
        num_held = next((size for size in sizes if self._old.startswith(rest[-size:])), 0)
        self._held = rest[len(rest) - num_held :]
        return (self._new.join([*done, rest[: len(rest) - num_held]]),)

    def close(self) -> tuple[str, ...]:
        return (self._held,)


# Replacements of transformers' ``clean_up_tokenization_spaces`` in order, for tokenizers other than BPE.
CLEANUP = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re")),
)


def _mapped(part: Mapping[str, Any]) -> Stage:
    """A stage that calls ``tokenizers`` itself. Some decoders treat the first token differently."""
    decoder = decoders.Fuse()
    decoder.__setstate__(json.dumps(part).encode())
    before = [""] if part["type"] in ("Metaspace", "WordPiece") else []
    return Stage(lambda token: decoder.decode([*before, token]), first=lambda token: decoder.decode([token]))


_STAGES: dict[str, Callable[[Mapping[str, Any]], Stage]] = {
    **dict.fromkeys(("Replace", "Strip", "Metaspace", "WordPiece"), _mapped),
    "BPEDecoder": _SuffixedWords,
    "ByteFallback": lambda part: _ByteFallback(),
    "ByteLevel": lambda part: _ByteLevel(),
    "Fuse": lambda part: Stage(),
}


def stage_makers(tokenizer: Tokenizer, clean_up_spaces: bool = False) -> list[Callable[[], Stage]]:
    """A factory for each part of the tokenizer's decoder. From ``ByteLevel`` or ``Fuse`` on, parts see joined text.

    ``clean_up_spaces`` adds ``CLEANUP``. Raises ``UnsupportedModelError`` for a part that cannot be streamed.
    """
    cleanup = [partial(_Substitution, old, new) for old, new in CLEANUP] if clean_up_spaces else []
    if tokenizer.decoder is None:
        return [partial(Stage, " {}".format, first=str), *cleanup]
    spec = json.loads(tokenizer.decoder.__getstate__())
    makers, fused = list[Callable[[], Stage]](), False
    for part in spec.get("decoders", [spec]):
        kind = part["type"]
        if kind not in _STAGES or (fused and (kind not in ("Strip", "Fuse") or part.get("stop"))):
            raise UnsupportedModelError(
                f"tokenizer: decoder {kind} cannot be streamed there, expected {', '.join(_STAGES)}; pick another model"
            )
        makers.append(partial(_StripStart if fused and kind == "Strip" else _STAGES[kind], part))
        fused = fused or kind in ("ByteLevel", "Fuse")
    return [*makers, *cleanup]


def bytes_of_token(token: str, makers: Sequence[Callable[[], Stage]]) -> bytes | None:
    """The bytes of a token, if a decoder of these parts encodes text in bytes; else None."""
    if match := _ByteFallback._BYTE.fullmatch(token):
        return bytes((int(match[1], 16),))
    if any(isinstance(make(), _ByteLevel) for make in makers) and _BYTE_OF_CHAR.keys() >= set(token):
        return bytes(map(_BYTE_OF_CHAR.__getitem__, token))
    return None
