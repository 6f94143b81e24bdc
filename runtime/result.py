"""The result of a generation and the definitions of its statistics."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from specrt.runtime.round import Round
from specrt.runtime.sampling.logprobs import TokenLogprobs
from specrt.runtime.settings import Settings


@dataclass
class Stats:
    """Counters of one generation; times in ms.

    ``reused_prompt_tokens`` were already in the target's cache, from an earlier sequence with the same prefix.
    ``time_to_first_token_ms`` is from the first step, after the prompt was encoded, to the first token; ``prefill_ms``
    the time of the prompt's passes of both models.

    ``drafted`` counts verified tokens, ``accepted`` those of them that were emitted, ``rounds`` target passes after
    the prefill. Always ``completion_tokens == prefill tokens (0 or 1) + accepted + own``, where ``own`` counts the
    target's own tokens that rounds emitted. ``drafted_histogram[i]`` counts rounds that verified ``i`` drafted tokens,
    ``acceptance_histogram[i]`` rounds that accepted ``i`` (only emitted tokens count).

    ``plain_round_ms`` is the controller's estimate for a round without drafted tokens; None without a controller.
    """

    prompt_tokens: int = 0
    reused_prompt_tokens: int = 0
    completion_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    own: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    drafted_histogram: list[int] = field(default_factory=list)
    time_to_first_token_ms: float = 0.0
    prefill_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    total_ms: float = 0.0
    plain_round_ms: float | None = None

    def add(self, done: Round) -> None:
        """Count one round, or the prefill."""
        self.completion_tokens += len(done.emitted)
        self.prefill_ms += done.prefill_ms
        self.draft_ms += done.draft_ms
        self.verify_ms += done.verify_ms
        if done.is_prefill:
            return
        self.rounds += 1
        self.drafted += len(done.drafted)
        self.accepted += done.num_accepted
        self.own += len(done.emitted) - done.num_accepted
        counts = ((self.acceptance_histogram, done.num_accepted), (self.drafted_histogram, len(done.drafted)))
        for histogram, count in counts:
            histogram.extend([0] * (count + 1 - len(histogram)))
            histogram[count] += 1

    @property
    def draft_acceptance_rate(self) -> float | None:
        """accepted / drafted; None if no token was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens emitted per round, the target's own included; None without rounds."""
        return (self.accepted + self.own) / self.rounds if self.rounds else None

    @property
    def host_ms(self) -> float:
        """Time outside the models' passes: the loop, the text, the caller between two pieces of a stream."""
        return max(0.0, self.total_ms - self.prefill_ms - self.draft_ms - self.verify_ms)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens emitted after the first, over the time after the prefill; None for fewer than two tokens."""
        decode_ms = self.total_ms - self.prefill_ms
        return (self.completion_tokens - 1) / decode_ms * 1e3 if self.completion_tokens > 1 and decode_ms > 0 else None

    @property
    def estimated_speedup(self) -> float | None:
        """tokens/s over those of plain decoding at ``plain_round_ms``; None if either is unknown."""
        if self.plain_round_ms is None or self.tokens_per_s is None:
            return None
        return self.tokens_per_s * self.plain_round_ms / 1e3

    def as_dict(self) -> dict[str, Any]:
        """The ``stats`` object of ``--json``."""
        hidden = ("prompt_tokens", "completion_tokens", "own")
        figures = {name: value for name, value in asdict(self).items() if name not in hidden}
        for name in (
            "draft_acceptance_rate",
            "mean_acceptance_length",
            "host_ms",
            "tokens_per_s",
            "estimated_speedup",
        ):
            figures[name] = getattr(self, name)
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}


@dataclass(frozen=True)
class Result:
    """A finished generation.

    ``token_ids`` are the new ids, with the ending id or the stop string's tokens; ``text`` ends before those.
    ``finish_reason`` is ``stop`` or ``length``; ``stop`` is the ending id or stop string that was found. ``logprobs``
    has an entry for each of ``token_ids``, or is None if not requested. ``settings`` are the effective settings.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    stop: int | str | None
    logprobs: list[TokenLogprobs] | None
    settings: Settings
    stats: Stats

    def as_dict(self) -> dict[str, Any]:
        """The object that ``specrt generate --json`` prints."""
        return {
            "token_ids": self.token_ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "stop": self.stop,
            "prompt_tokens": self.stats.prompt_tokens,
            "completion_tokens": self.stats.completion_tokens,
            "logprobs": None if self.logprobs is None else [asdict(entry) for entry in self.logprobs],
            "settings": self.settings.as_dict(),
            "stats": self.stats.as_dict(),
        }
