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


def completion_logprobs(codec: TextCodec, entries: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
    """For ``text_completion``. ``offset``: number of characters of the choice before these tokens."""

    def name(token_id: int) -> str:
        return codec.token_bytes(token_id).decode(errors="replace")

    tokens = [name(entry.token_id) for entry in entries]
    offsets = [offset + sum(map(len, tokens[:index])) for index in range(len(tokens))]
    tops = [{name(token_id): max(logprob, _LEAST) for token_id, logprob in entry.top} for entry in entries]
    return {
        "tokens": tokens,
        "token_logprobs": [max(entry.logprob, _LEAST) for entry in entries],
        "top_logprobs": tops if any(tops) else None,
        "text_offset": offsets,
    }
