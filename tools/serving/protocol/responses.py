"""Responses as OpenAI's objects: whole, and in chunks."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specrt.serving.protocol.choices import Choice, Delta, merged_calls, timings_of
from specrt.serving.protocol.logprobs import CompletionLogprobs, chat_logprobs
from specrt.serving.protocol.requests import Wanted


def usage_of(choices: Sequence[Choice], num_prompt_tokens: int) -> dict[str, Any]:
    """``usage``. Each prompt counts once, for any number of choices."""
    completion = sum(choice.num_tokens for choice in choices)
    cached = max((choice.stream.stats.reused_prompt_tokens for choice in choices), default=0)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": num_prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Answer:
    """Builds the objects of one response."""

    def __init__(self, wanted: Wanted, model: str, fingerprint: str, num_prompt_tokens: int) -> None:
        self._wanted, self._num_prompt_tokens = wanted, num_prompt_tokens
        self._begun = set[int]()
        self._logprobs_of = dict[int, CompletionLogprobs]()
        kind = "chat.completion" if wanted.is_chat else "text_completion"
        is_chunk = wanted.stream and wanted.is_chat
        self._head = {
            "id": f"{'chatcmpl' if wanted.is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": f"{kind}.chunk" if is_chunk else kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    @property
    def id(self) -> str:
        """The id of the response."""
        return str(self._head["id"])

    def whole(self, choices: Sequence[Choice], deltas: Mapping[int, Delta]) -> dict[str, Any]:
        """The response that is not streamed."""
        answer = {
            **self._head,
            "choices": [self._choice(choice, deltas[choice.index]) for choice in choices],
            "usage": usage_of(choices, self._num_prompt_tokens),
        }
        if self._wanted.timings:
            answer["timings"] = timings_of(choices[0].stream)
        return answer

    def chunks(self, choice: Choice, delta: Delta) -> Iterator[dict[str, Any]]:
        """The chunks of a round. The first chunk has the role, the last one the finish reason."""
        if self._wanted.is_chat and choice.index not in self._begun:
            yield self._chunk(choice, {"role": "assistant", "content": ""}, Delta())
        is_first = choice.index not in self._begun
        self._begun.add(choice.index)
        if not self._wanted.is_chat and is_first and choice.prefix:
            delta = Delta(choice.prefix + delta.content, [], delta.logprobs, delta.token_ids, delta.rounds)
        has_more = (self._wanted.token_ids and delta.token_ids) or delta.rounds or delta.logprobs
        body: dict[str, Any] = {}
        if delta.content or has_more:
            body["content"] = delta.content
        if body:
            yield self._chunk(choice, body, delta)
        for entry in delta.tool_calls:  # one in a chunk, since clients join the entries of different chunks only
            yield self._chunk(choice, {"tool_calls": [entry]}, Delta())
        if choice.finish_reason is not None:
            yield self._chunk(choice, {}, Delta(), choice.finish_reason)

    def usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The last chunk of a stream with ``include_usage``."""
        return {**self._head, "choices": [], "usage": usage_of(choices, self._num_prompt_tokens)}

    def _chunk(
        self, choice: Choice, body: Mapping[str, Any], delta: Delta, finish_reason: str | None = None
    ) -> dict[str, Any]:
        part: dict[str, Any] = {"index": choice.index}
        if self._wanted.is_chat:
            part["delta"] = body
        else:
            part["text"] = body.get("content", "")
        part["logprobs"] = self._logprobs(choice, delta)
        part["finish_reason"] = finish_reason
        part.update(self._extensions(delta))
        chunk = {**self._head, "choices": [part]}
        if self._wanted.include_usage:
            chunk["usage"] = None
        if self._wanted.timings and (body or finish_reason):
            chunk["timings"] = timings_of(choice.stream)
        return chunk

    def _choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        part: dict[str, Any] = {"index": choice.index}
        if self._wanted.is_chat:
            content = delta.content if delta.content or not delta.tool_calls else None
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if delta.tool_calls:
                message["tool_calls"] = merged_calls(delta.tool_calls)
            part["message"] = message
        else:
            part["text"] = choice.prefix + delta.content
        part["logprobs"] = self._logprobs(choice, delta)
        part["finish_reason"] = choice.finish_reason
        part.update(self._extensions(delta))
        return part

    def _extensions(self, delta: Delta) -> dict[str, Any]:
        part: dict[str, Any] = {}
        if self._wanted.token_ids:
            part["token_ids"] = delta.token_ids
        if self._wanted.rounds:
            part["rounds"] = delta.rounds
        return part

    def _logprobs(self, choice: Choice, delta: Delta) -> dict[str, Any] | None:
        if self._wanted.options.get("logprobs") is None or (self._wanted.stream and not delta.logprobs):
            return None
        if self._wanted.is_chat:
            return chat_logprobs(choice.codec, delta.logprobs)
        if choice.index not in self._logprobs_of:
            self._logprobs_of[choice.index] = CompletionLogprobs(choice.codec, len(choice.prefix))
        return self._logprobs_of[choice.index].part(delta.logprobs)


def encoded(data: Mapping[str, Any]) -> bytes:
    """JSON in UTF-8. Unpaired surrogates, which UTF-8 cannot encode, are escaped."""
    try:
        return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(data, separators=(",", ":")).encode()


def event(data: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + encoded(data) + b"\n\n"


DONE = b"data: [DONE]\n\n"
