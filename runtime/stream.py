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


class Stream:
    """Pieces of text as they become final. Iterate once; close it to stop early and free the sequence.

    The joined pieces equal ``result.text``. ``token_ids`` holds the new ids so far, ``settings`` what is in force.
    """

    def __init__(self, rounds: Rounds, text: StopWatch, settings: Settings) -> None:
        self.settings = settings
        self.stats = Stats()
        self.token_ids: list[int] = []
        self._text = text
        self._result: Result | None = None
        self._pieces = self._run(rounds)

    def _watch(self, token: int) -> bool:
        return self._text.push(token, self.stats.completion_tokens >= self.settings.min_new_tokens)

    def _run(self, rounds: Rounds) -> Iterator[str]:
        started = time.perf_counter()
        pieces: list[str] = []
        logprobs: list[TokenLogprobs] = []
        for emitted in rounds(self.stats, self._watch):
            if not self.token_ids:
                self.stats.time_to_first_token_ms = (time.perf_counter() - started) * 1e3
            self.token_ids += emitted.token_ids
            logprobs += emitted.logprobs
            if piece := self._text.take():
                pieces.append(piece)
                yield piece
        if piece := self._text.finish():
            pieces.append(piece)
            yield piece
        self.stats.total_ms = (time.perf_counter() - started) * 1e3
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
        self._pieces.close()  # type: ignore[attr-defined]
