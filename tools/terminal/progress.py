"""Progress on a terminal, with rich."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from specrt.engines.errors import UsageError
from specrt.engines.progress import Progress


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


class _Lines:
    """Notes above the bars."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars

    def note(self, line: str) -> None:
        self._bars.console.print(line, highlight=False, markup=False, soft_wrap=True)


class _BarByStep(_Lines):
    """One bar or spinner a step; a finished step leaves its time behind."""

    def __init__(self, bars: Bars) -> None:
        super().__init__(bars)
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
def shown_progress() -> Iterator[Progress]:
    """A bar on standard error for each step."""
    with _bars() as bars:
        shown = _BarByStep(bars)
        yield shown
        shown.finish()


class _BarOfSteps(_Lines):
    """One bar that counts the steps."""

    def __init__(self, bars: Bars, num_steps: int) -> None:
        super().__init__(bars)
        self._task = bars.add_task("starting", total=num_steps)

    def step(self, name: str, total: int | None = None) -> None:
        self._bars.update(self._task, advance=1, description=name)

    def advance(self, amount: int) -> None:
        """Steps are too short to be shown in parts."""


@contextmanager
def shown_steps(num_steps: int) -> Iterator[Progress]:
    """One bar on standard error for all steps; only a terminal shows it."""
    with _bars() as bars:
        yield _BarOfSteps(bars, num_steps)
