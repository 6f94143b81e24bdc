"""Progress on a terminal, by rich, and errors as one line, for commands outside the ``specrt`` group."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from specrt.engines.errors import INTERRUPTED_EXIT_CODE, SpecrtError

Advance = Callable[[str], None]


def quiet_libraries() -> None:
    """Keep torch, transformers and their friends from talking over the progress display. Call before importing them."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)


class _Shown:
    """One bar or spinner a step; a finished step leaves its time behind."""

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


@contextmanager
def shown_progress() -> Iterator[_Shown]:
    """A ``specrt.engines.progress.Progress`` on standard error."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        shown = _Shown(bars)
        yield shown
        shown.finish()


@contextmanager
def shown_steps(total: int) -> Iterator[Advance]:
    """One bar on standard error that counts to ``total``; only a terminal shows it."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("starting", total=total)
        yield lambda step: bars.update(task, advance=1, description=step)


@contextmanager
def one_line() -> Iterator[None]:
    """Errors as one line and an exit code (docs/exit-codes.md)."""
    try:
        yield
    except (SpecrtError, OSError) as error:
        click.echo(f"specrt: error: {error}", err=True)
        raise SystemExit(getattr(error, "exit_code", 1)) from error
    except KeyboardInterrupt:
        click.echo("specrt: interrupted", err=True)
        raise SystemExit(INTERRUPTED_EXIT_CODE) from None
