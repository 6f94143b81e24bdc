"""Many requests on one engine: their sequences take turns, round by round, in one thread.

Requests are served in order of arrival, with a fair share: a free place goes to the request with the fewest running
sequences, and among those to the first. Running sequences take turns of one round each.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from specrt.runtime.stream import Step, Stream

_LOG = logging.getLogger(__name__)
# (step) while it runs, (None) at its end, (exception) on failure; called in the engine's thread
Outcome = Step | BaseException | None


@dataclass(eq=False)
class Generation:
    """One text that is being generated. ``report`` is called in the engine's thread and must not block.

    Times are from ``time.monotonic``.
    """

    stream: Stream
    report: Callable[[Outcome], None]
    deadline: float = float("inf")
    started: float | None = None
    is_cancelled: bool = False

    def send(self, outcome: Outcome) -> None:
        """Report ``outcome``. If ``report`` raises, the generation ends with that exception, and no other does."""
        try:
            self.report(outcome)
        except Exception as error:
            _LOG.error("a generation's report failed", exc_info=error)
            self.is_cancelled = True
            with suppress(Exception):
                self.report(error)


@dataclass(eq=False)
class Group:
    """The generations of one request, which share its position in the queue."""

    generations: Sequence[Generation]
    num_running: int = 0


@dataclass(eq=False)
class Row:
    """A running generation: a row of the next set of rounds."""

    generation: Generation
    group: Group


class RoundRunner(Protocol):
    """Runs one round for each of up to ``max_rows`` rows; yields (row, outcome) when a row is done."""

    max_rows: int

    def run(self, rows: Sequence[Row]) -> Iterator[tuple[Row, Outcome]]: ...


class OneByOne:
    """Runs one row at a time on the whole engine."""

    max_rows = 1

    def run(self, rows: Sequence[Row]) -> Iterator[tuple[Row, Outcome]]:
        for row in rows:
            try:
                yield row, next(row.generation.stream.steps, None)
            except Exception as error:  # an engine's error ends only this sequence
                yield row, error


class QueueFull(Exception):
    """The queue is full."""


class Draining(Exception):
    """The server takes no new requests, or has ended the running ones."""


class DeadlinePassed(Exception):
    """The request passed its deadline."""


class Scheduler:
    """Owns the engine's thread. ``submit`` and ``cancel`` may be called from any thread."""

    def __init__(self, max_concurrency: int, queue_size: int, runner: RoundRunner | None = None) -> None:
        self.max_concurrency, self.queue_size = max_concurrency, queue_size
        self._runner: RoundRunner = runner or OneByOne()
        self._waiting: list[tuple[Group, deque[Generation]]] = []  # in the order of arrival
        self._running: deque[Row] = deque()  # in the order of their turns
        self._is_draining = self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name="specrt-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

    @property
    def num_running(self) -> int:
        """Running generations."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Generations that wait for a place."""
        with self._changed:
            return sum(len(rest) for _, rest in self._waiting)

    def submit(self, generations: Sequence[Generation]) -> None:
        """Take a request. Raises ``QueueFull`` and ``Draining``."""
        with self._changed:
            if self._is_draining:
                raise Draining
            self._admit()
            if len(self._running) >= self.max_concurrency and len(self._waiting) >= self.queue_size:
                raise QueueFull
            self._waiting.append((Group(generations), deque(generations)))
            self._admit()
            self._changed.notify_all()

    def cancel(self, generations: Iterable[Generation]) -> None:
        """End generations; running ones before their next round. They are no longer reported."""
        with self._changed:
            for generation in generations:
                generation.is_cancelled = True
            self._drop_waiting(lambda generation: generation.is_cancelled)
            self._changed.notify_all()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take no more requests and wait for the current ones. False if ``timeout_s`` passed first."""
        with self._changed:
            self._is_draining = True
            return self._changed.wait_for(lambda: not self._waiting and not self._running, timeout_s)

    def close(self) -> None:
        """End all requests, which is reported as ``Draining``, and the thread."""
        self._end_all(Draining())
        self._thread.join()

    def _serve(self) -> None:
        try:
            while rows := self._next_rows():
                for row, outcome in self._runner.run(rows):
                    self._finish_round(row, outcome)
        except Exception as error:  # else every request would wait for a thread that has ended
            _LOG.critical("the engine's thread failed", exc_info=error)
            self._end_all(error)
            with self._changed:
                self._end_rows()
                self._changed.notify_all()

    def _end_all(self, outcome: Outcome) -> None:
        """Take no more requests, and report ``outcome`` to those there are."""
        with self._changed:
            self._is_draining = self._is_closed = True
            ended = [generation for _, rest in self._waiting for generation in rest]
            ended += [row.generation for row in self._running if not row.generation.is_cancelled]
            self.cancel(ended)
        for generation in ended:
            generation.send(outcome)

    def _next_rows(self) -> list[Row]:
        """The rows of the next rounds. Waits until there are some; empty at the end."""
        with self._changed:
            while True:
                self._end_rows()
                self._admit()
                if self._running:
                    num_rows = min(self._runner.max_rows, len(self._running))
                    self._running.rotate(-num_rows)
                    return list(self._running)[-num_rows:]
                self._changed.notify_all()
                if self._is_closed:
                    return []
                self._changed.wait()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.max_concurrency:
            group, rest = min(self._waiting, key=lambda entry: entry[0].num_running)
            generation = rest.popleft()
            generation.started = time.monotonic()
            group.num_running += 1
            self._running.append(Row(generation, group))
            self._drop_waiting(lambda _: False)

    def _drop_waiting(self, is_dropped: Callable[[Generation], bool]) -> None:
        """Remove generations from the queue, and requests that have none left."""
        kept = [(group, deque(g for g in rest if not is_dropped(g))) for group, rest in self._waiting]
        self._waiting = [(group, rest) for group, rest in kept if rest]

    def _end_rows(self) -> None:
        """Free the places of generations that were cancelled or passed their deadline."""
        now = time.monotonic()
        late = [g for _, rest in self._waiting for g in rest if g.deadline < now]
        self._drop_waiting(lambda generation: generation.deadline < now)
        for row in list(self._running):
            if row.generation.is_cancelled or row.generation.deadline < now:
                self._remove(row)
                row.generation.stream.close()
                late += [] if row.generation.is_cancelled else [row.generation]
        for generation in late:
            generation.send(DeadlinePassed())

    def _finish_round(self, row: Row, outcome: Outcome) -> None:
        with self._changed:
            if not isinstance(outcome, Step):
                self._remove(row)
            if row.generation.is_cancelled:
                return
        row.generation.send(outcome)

    def _remove(self, row: Row) -> None:
        self._running.remove(row)
        row.group.num_running -= 1
