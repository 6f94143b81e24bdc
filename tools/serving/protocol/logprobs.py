"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specrt.runtime.sampling.logprobs import TokenLogprobs
from specrt.runtime.text.codec import TextCodec

_LEAST = -9999.0  # vLLM's number for minus infinity, which JSON does not have


def chat_logprobs(codec: TextCodec, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """For ``chat.completion`` and its chunks. ``bytes`` are the token's, which may be a part of a character."""

    def token(token_id: int, logprob: float) -> dict[str, Any]:
        data = codec.token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": max(logprob, _LEAST), "bytes": list(data)}

    return {
        "content": [
            {**token(entry.token_id, entry.logprob), "top_logprobs": [token(*top) for top in entry.top]}
            for entry in entries
        ],
        "refusal": None,
    }


class CompletionLogprobs:
    """For ``text_completion`` and its chunks: the parts of one choice, in order.

    ``offset`` is the number of characters of the choice before its first token. The offset of a token is that of the
    character that it begins, or is a part of.
    """

    def __init__(self, codec: TextCodec, offset: int) -> None:
        self._codec, self._texts, self._offset = codec, codec.stream(), offset

    def part(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The object for the next tokens."""
        tops = [{self._name(token): max(logprob, _LEAST) for token, logprob in entry.top} for entry in entries]
        return {
            "tokens": [self._name(entry.token_id) for entry in entries],
            "token_logprobs": [max(entry.logprob, _LEAST) for entry in entries],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": [self._offset_of(entry.token_id) for entry in entries],
        }

    def _name(self, token_id: int) -> str:
        return self._codec.token_bytes(token_id).decode(errors="replace")

    def _offset_of(self, token_id: int) -> int:
        offset = self._offset
        self._offset += len(self._texts.push(token_id))
        return offset
