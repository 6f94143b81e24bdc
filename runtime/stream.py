"""A generation while it runs: final pieces of text, and the result at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

from specrt.runtime.completion import Completion
from specrt.runtime.result import Result, Stats
from specrt.runtime.round import Round
from specrt.runtime.text.stops import StopWatch


class Step(NamedTuple):
    """One round, or a part of the prefill, and the ``text`` that became final in it, which may be empty."""

    text: str
    round: Round


class Stream:
    """Pieces of text as they become final. Iterate once; close it to stop early and free the sequence.

    The joined pieces equal ``result.text``. ``settings`` are the effective settings, ``rounds`` the steps so far: the
    prefill, then the rounds. ``steps`` is the same stream by rounds, for a caller that interleaves several. Iterate one
    of the two.
    """

    def __init__(self, rounds: Iterator[Round], completion: Completion, text: StopWatch, stats: Stats) -> None:
        self.settings, self.stats = completion.settings, stats
        self.rounds: list[Round] = []
        self._completion, self._text = completion, text
        self._started: float | None = None
        self._result: Result | None = None
        self.steps: Iterator[Step] = self._run(rounds)
        self._pieces = (step.text for step in self.steps if step.text)

    @property
    def token_ids(self) -> list[int]:
        """The new ids so far."""
        return self._completion.new_tokens

    @property
    def elapsed_ms(self) -> float:
        """Time since the start of the generation, up to its end; 0 before the start."""
        if self._result is not None or self._started is None:
            return self.stats.total_ms
        return (time.perf_counter() - self._started) * 1e3

    def _run(self, rounds: Iterator[Round]) -> Iterator[Step]:
        started = self._started = time.perf_counter()
        pieces: list[str] = []
        for done in rounds:
            if done.is_prefill:
                self.stats.time_to_first_token_ms = (time.perf_counter() - started) * 1e3
            self.rounds.append(done)
            pieces.append(self._text.take())
            yield Step(pieces[-1], done)
        self.stats.total_ms = (time.perf_counter() - started) * 1e3
        self._result = self._finished("".join(pieces))

    def _finished(self, text: str) -> Result:
        completion, settings = self._completion, self.settings
        assert completion.finish_reason is not None, "rounds go on until there is a reason"
        logprobs = None if settings.logprobs is None else [entry for done in self.rounds for entry in done.logprobs]
        return Result(
            completion.new_tokens, text, completion.finish_reason, completion.stop, logprobs, settings, self.stats
        )

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    @property
    def has_ended(self) -> bool:
        """Whether ``result`` is available."""
        return self._result is not None

    @property
    def result(self) -> Result:
        """The finished generation. Raises ``RuntimeError`` before the stream has ended."""
        if self._result is None:
            raise RuntimeError("the stream has not ended; iterate it first")
        return self._result

    def close(self) -> None:
        """Stop between rounds and return the sequence's buffers to the pool."""
        self.steps.close()  # type: ignore[attr-defined]
