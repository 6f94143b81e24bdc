"""A generation as it happens: pieces of text that are final, and the result at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from specrt.runtime.result import Result, Stats
from specrt.runtime.round import Watch
from specrt.runtime.sampling.logprobs import TokenLogprobs
from specrt.runtime.settings import Settings
from specrt.runtime.text.stops import StopWatch


class Emitted(NamedTuple):
    """What a round emitted, with log-probabilities where they are wanted."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]


# (stats to keep, what gets each token) -> rounds
Rounds = Callable[[Stats, Watch], Iterator[Emitted]]


class Step(NamedTuple):
    """What one round added. ``text`` became final in it, and may be empty or end before the text of ``token_ids``.

    The first step is the prefill's, which drafts nothing; the last may have text alone, that a stop string held back.
    Of ``token_ids`` the first ``num_accepted_tokens`` were drafted, and the rest are the target's own.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    num_draft_tokens: int
    num_accepted_tokens: int


class Stream:
    """Pieces of text as they become final. Iterate once; close it to stop early and free the sequence.

    The joined pieces equal ``result.text``. ``token_ids`` holds the new ids so far, ``settings`` what is in force.
    ``steps`` is the same stream round by round, for a caller that interleaves several: iterate one of the two.
    """

    def __init__(self, rounds: Rounds, text: StopWatch, settings: Settings) -> None:
        self.settings = settings
        self.stats = Stats()
        self.token_ids: list[int] = []
        self._text = text
        self._started: float | None = None
        self._result: Result | None = None
        self.steps: Iterator[Step] = self._run(rounds)
        self._pieces = (step.text for step in self.steps if step.text)

    def _watch(self, token: int) -> bool:
        return self._text.push(token, self.stats.completion_tokens >= self.settings.min_new_tokens)

    @property
    def elapsed_ms(self) -> float:
        """From the beginning of the generation to its end, or to now; 0 before it has begun."""
        if self._result is not None or self._started is None:
            return self.stats.total_ms
        return (time.perf_counter() - self._started) * 1e3

    def _run(self, rounds: Rounds) -> Iterator[Step]:
        started = self._started = time.perf_counter()
        stats = self.stats
        pieces: list[str] = []
        logprobs: list[TokenLogprobs] = []
        drafted = accepted = 0
        for emitted in rounds(stats, self._watch):
            if not self.token_ids:
                stats.time_to_first_token_ms = (time.perf_counter() - started) * 1e3
            self.token_ids += emitted.token_ids
            logprobs += emitted.logprobs
            pieces.append(self._text.take())
            yield Step(pieces[-1], *emitted, stats.drafted - drafted, stats.accepted - accepted)
            drafted, accepted = stats.drafted, stats.accepted
        if piece := self._text.finish():
            pieces.append(piece)
            yield Step(piece, [], [], 0, 0)
        stats.total_ms = (time.perf_counter() - started) * 1e3
        self._result = self._finished("".join(pieces), logprobs)

    def _finished(self, text: str, logprobs: list[TokenLogprobs]) -> Result:
        stop: int | str | None = self._text.matched
        if stop is not None:
            self.stats.finish_reason = "stop"
        elif self.token_ids and self.token_ids[-1] in self.settings.ending_ids:
            stop = self.token_ids[-1]
        return Result(
            self.token_ids,
            text,
            self.stats.finish_reason or "length",
            stop,
            None if self.settings.logprobs is None else logprobs,
            self.settings,
            self.stats,
        )

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    @property
    def result(self) -> Result:
        """The whole. Raises ``RuntimeError`` before the stream has ended."""
        if self._result is None:
            raise RuntimeError("the stream has not ended; iterate it first")
        return self._result

    def close(self) -> None:
        """Stop between rounds and give the sequence's buffers back."""
        self.steps.close()  # type: ignore[attr-defined]
