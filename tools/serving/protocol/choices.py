"""A choice of a response while it is generated: text, tool calls, log-probabilities, and the source of tokens."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specrt.runtime.sampling.logprobs import TokenLogprobs
from specrt.runtime.stream import Step, Stream
from specrt.runtime.text.codec import TextCodec
from specrt.runtime.text.detokenizer import TextStream
from specrt.serving.protocol.tool_fields import ToolUse
from specrt.serving.protocol.tool_parsers import CallArguments, CallBegin, Event, Format, ToolParser

_ID_CHARS = string.ascii_letters + string.digits


@dataclass
class Delta:
    """The addition of a round to a choice. Empty if no text became final.

    The first entry of a call in ``tool_calls`` has its id and name and empty arguments, further ones have pieces of
    the arguments. ``merged_calls`` joins them.
    """

    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)

    def __iadd__(self, other: Delta) -> Delta:
        self.content += other.content
        for name in ("tool_calls", "logprobs", "token_ids", "rounds"):
            getattr(self, name).extend(getattr(other, name))
        return self


@dataclass(frozen=True)
class Calling:
    """The format of tool calls, and the tools that may be called."""

    form: Format
    use: ToolUse


class Choice:
    """Takes the steps of ``stream``; the deltas from ``add`` and ``end`` make up the response.

    ``num_prompt_tokens`` is the length of its prompt; ``prefix`` is the echoed prompt, if requested.
    """

    def __init__(
        self,
        index: int,
        stream: Stream,
        codec: TextCodec,
        num_prompt_tokens: int,
        calling: Calling | None = None,
        with_rounds: bool = False,
        visible: Sequence[str] = (),
        prefix: str = "",
    ) -> None:
        self.index, self.stream, self.codec = index, stream, codec
        self.num_prompt_tokens, self.prefix = num_prompt_tokens, prefix
        self.finish_reason: str | None = None
        self._calling = calling
        self._parser = None if calling is None else ToolParser(calling.form, calling.use.names)
        self._num_calls = 0  # that have begun
        # A grammar of one call ends by itself
        self._ends_at_call = calling is not None and not (calling.use.parallel or calling.use.is_forced)
        self._has_ended = False
        self._token_texts: TextStream | None = codec.stream(visible) if with_rounds else None

    @property
    def num_tokens(self) -> int:
        """New tokens so far."""
        return len(self.stream.token_ids)

    def add(self, step: Step) -> Delta:
        """Add a round; return its delta."""
        delta = self._parsed(step.text)
        delta.logprobs, delta.token_ids = list(step.round.logprobs), step.round.emitted
        if self._token_texts is not None and step.round.emitted:
            delta.rounds = [self._round(step, self._token_texts)]
        if self._has_ended:
            self.finish_reason = "tool_calls"
        return delta

    def end(self) -> Delta:
        """End the text; return the last delta. ``finish_reason`` is known from here on."""
        delta = Delta()
        if self._parser is not None:
            delta = self._deltas(self._parser.finish())
        reason = self.stream.result.finish_reason
        self.finish_reason = "tool_calls" if self._num_calls and reason == "stop" else reason
        return delta

    def _parsed(self, text: str) -> Delta:
        if self._parser is None:
            return Delta(text)
        return self._deltas(self._parser.push(text))

    def _deltas(self, events: Sequence[Event]) -> Delta:
        delta = Delta()
        for event in events:
            if self._has_ended:
                break
            if isinstance(event, str):
                delta.content += event
            elif isinstance(event, CallBegin):
                delta.tool_calls.append(self._begun_call(event.name))
            elif isinstance(event, CallArguments):
                _add_arguments(delta.tool_calls, self._num_calls - 1, event.text)
            else:
                self._has_ended = self._ends_at_call
        return delta

    def _begun_call(self, name: str) -> dict[str, Any]:
        assert self._calling is not None
        length = self._calling.form.id_length
        call_id = "".join(secrets.choice(_ID_CHARS) for _ in range(length))
        index, self._num_calls = self._num_calls, self._num_calls + 1
        return {
            "index": index,
            "id": call_id if length == 9 else f"call_{call_id}",
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }

    def _round(self, step: Step, texts: TextStream) -> dict[str, Any]:
        """The round for ``return_rounds``. A part of a character is shown with the token that completes it."""
        tokens = [
            {"id": token, "text": texts.push(token), "origin": "draft" if i < step.round.num_accepted else "target"}
            for i, token in enumerate(step.round.emitted)
        ]
        return {
            "num_draft_tokens": len(step.round.drafted),
            "num_accepted_tokens": step.round.num_accepted,
            "tokens": tokens,
        }


def _add_arguments(calls: list[dict[str, Any]], index: int, text: str) -> None:
    """Add a piece of the arguments of call ``index``, to the last entry if that is a piece of them."""
    if calls and calls[-1]["index"] == index and "id" not in calls[-1]:
        calls[-1]["function"]["arguments"] += text
    else:
        calls.append({"index": index, "function": {"arguments": text}})


def merged_calls(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Complete calls from the entries of deltas, as in an answer that is not streamed."""
    calls: list[dict[str, Any]] = []
    for entry in entries:
        if "id" in entry:
            function = dict(entry["function"])
            calls.append({"id": entry["id"], "type": entry["type"], "function": function})
        else:
            calls[entry["index"]]["function"]["arguments"] += entry["function"]["arguments"]
    return calls


def timings_of(stream: Stream) -> Mapping[str, Any]:
    """llama.cpp's ``timings`` of a generation so far; times in ms."""
    stats = stream.stats
    prompt_n = stats.prompt_tokens - stats.reused_prompt_tokens
    predicted_ms = max(0.0, stream.elapsed_ms - stats.prefill_ms)
    predicted_n = max(0, stats.completion_tokens - 1)  # the first is the prefill's
    return {
        "cache_n": stats.reused_prompt_tokens,
        "prompt_n": prompt_n,
        "prompt_ms": stats.prefill_ms,
        "prompt_per_token_ms": stats.prefill_ms / prompt_n if prompt_n else 0.0,
        "prompt_per_second": prompt_n / stats.prefill_ms * 1e3 if stats.prefill_ms else 0.0,
        "predicted_n": stats.completion_tokens,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / predicted_n if predicted_n else 0.0,
        "predicted_per_second": predicted_n / predicted_ms * 1e3 if predicted_ms else 0.0,
        "draft_n": stats.drafted,
        "draft_n_accepted": stats.accepted,
    }
