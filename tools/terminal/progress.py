"""Progress on a terminal, with rich."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from specrt.engines.errors import UsageError

Advance = Callable[[str], None]


def quiet_libraries() -> None:
    """Keep torch and transformers from printing over the progress display. Call before importing them.

    Raises ``UsageError`` in a working directory that was removed, where torch's MKL would end the process.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError("the working directory does not exist any more; change to one that does") from error
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)


class _Shown:
    """One bar or spinner per step; the time of a finished step stays on screen."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._task: TaskID | None = None
        self._name = ""
        self._started = time.perf_counter()

    def step(self, name: str, total: int | None = None) -> None:
        self.finish()
        self._name, self._started = name, time.perf_counter()
        self._task = self._bars.add_task(name, total=total)

    def advance(self, amount: int) -> None:
        if self._task is not None:
            self._bars.advance(self._task, amount)

    def note(self, line: str) -> None:
        self._bars.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def finish(self) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._task = None
            self.note(f"{self._name}: {time.perf_counter() - self._started:.1f} s")


def spinner_name(console: Console) -> str:
    """The spinner that the console's encoding can show."""
    return "dots" if console.encoding.startswith("utf") else "line"


def _bars() -> Bars:
    console = Console(stderr=True)
    spinner = SpinnerColumn(spinner_name(console))
    columns = (spinner, TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Bars(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def shown_progress() -> Iterator[_Shown]:
    """A ``specrt.engines.progress.Progress`` on standard error."""
    with _bars() as bars:
        shown = _Shown(bars)
        yield shown
        shown.finish()


@contextmanager
def shown_steps(total: int) -> Iterator[Advance]:
    """One bar on standard error that counts to ``total``; only a terminal shows it."""
    with _bars() as bars:
        task = bars.add_task("starting", total=total)
        yield lambda step: bars.update(task, advance=1, description=step)
