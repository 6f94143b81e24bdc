"""How a command reports an exception: one line on standard error and an exit code (docs/exit-codes.md).

Errors of the tree are raised where they happen. Other exceptions are classified here, by their errno where they have
one; an exception of any other kind is a fault of specrt and is reported as such. ``SPECRT_DEBUG=1`` shows the traceback
of every exception that is reported here.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from specrt.engines.errors import (
    HUNG_UP_EXIT_CODE,
    INTERNAL_EXIT_CODE,
    INTERRUPTED_EXIT_CODE,
    TERMINATED_EXIT_CODE,
    ResourceError,
    SpecrtError,
    UsageError,
)
from specrt.engines.storage.files import EXHAUSTED, UNUSABLE, errno_of, reason_of
from specrt.tools.terminal.streams import STDOUT

_ON_PURPOSE = (SpecrtError, click.ClickException, click.Abort, KeyboardInterrupt, BrokenPipeError)
_SERVE = ("starlette", "uvicorn", "prometheus_client", "anyio")
_STOPPED = {
    HUNG_UP_EXIT_CODE: "hung up",
    INTERRUPTED_EXIT_CODE: "interrupted",
    TERMINATED_EXIT_CODE: "terminated",
}


class Stopped(BaseException):
    """A signal that ends the process; ``exit_code`` is 128 plus the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


class ReaderLeft(Exception):
    """The reader of the pipe on standard output has closed it."""


class OneLine:
    """Mixin for click commands and groups: errors end in one line and a documented exit code, never in a traceback."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **{**kwargs, "standalone_mode": False})  # type: ignore[misc]
        except SystemExit:
            raise
        except BaseException as error:
            raise SystemExit(report(error)) from error

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _before_click():
            return super().make_context(*args, **kwargs)  # type: ignore[misc]

    def invoke(self, ctx: click.Context) -> Any:
        with _before_click():
            return super().invoke(ctx)  # type: ignore[misc]


@contextmanager
def _before_click() -> Iterator[None]:
    """Handle a closed pipe and Ctrl-C before click, which exits with 1 for the one and adds a line for the other."""
    try:
        yield
    except BrokenPipeError as error:
        raise ReaderLeft from error
    except KeyboardInterrupt as error:
        if sys.stderr.isatty():
            click.echo(err=True)  # the terminal shows ^C at the end of its line
        raise Stopped(signal.SIGINT) from error
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # rich would exit with 1 too
            raise ReaderLeft from error
        raise


class Tool(OneLine, click.Command):
    """A command outside the ``specrt`` group: ``python -m specrt.tools.NAME``."""


def report(error: BaseException) -> int:
    """Print the one line of ``error`` on standard error; return the exit code."""
    line, code = outcome_of(error)
    if os.environ.get("SPECRT_DEBUG") == "1" and not isinstance(error, (*_ON_PURPOSE, ReaderLeft, Stopped)):
        click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
    if line:
        click.echo(line, err=True)
    return code


def outcome_of(error: BaseException) -> tuple[str, int]:
    """(line, exit code). The line is empty when the reader of the output has closed it, which is no failure."""
    if isinstance(error, ReaderLeft | BrokenPipeError):
        return "", 0
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return f"specrt: {_STOPPED[INTERRUPTED_EXIT_CODE]}", INTERRUPTED_EXIT_CODE
    if isinstance(error, Stopped):
        return f"specrt: {_STOPPED.get(error.exit_code, 'stopped')}", error.exit_code
    text, code = _sorted(error)
    return f"specrt: {'internal ' if code == INTERNAL_EXIT_CODE else ''}error: {' '.join(text.splitlines())}", code


def _sorted(error: BaseException) -> tuple[str, int]:
    number = errno_of(error)
    if isinstance(error, SpecrtError):
        # "cannot be read" or "cannot be traced", for lack of memory or disk
        return str(error), ResourceError.exit_code if number in EXHAUSTED else error.exit_code
    if isinstance(error, click.ClickException):
        has_help = isinstance(error, click.UsageError) and error.ctx is not None
        hint = f"; see '{error.ctx.command_path} --help'" if has_help else ""  # type: ignore[attr-defined]
        return " ".join(error.format_message().split()) + hint, error.exit_code
    if isinstance(error, OSError) and number is not None:
        return _system_error(error, number)
    if number in EXHAUSTED:
        return f"{os.strerror(number or 0)}; free some, or use less ({reason_of(error)})", ResourceError.exit_code
    if isinstance(error, ModuleNotFoundError):
        extra = "specrt[serve]" if error.name in _SERVE else "specrt[export] or specrt[bench]"
        text = f"{error.name} is not installed and this command needs it; install {extra}"
        return text, UsageError.exit_code
    if isinstance(error, UnicodeError):
        return f"text: cannot be read or written ({error}); give UTF-8 text", UsageError.exit_code
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # pathlib, of '~nobody/model'
        return f"path: {error} Give the path without '~'", UsageError.exit_code
    if isinstance(error, RecursionError):
        return f"input: nested too deeply ({error}); give a simpler one", UsageError.exit_code
    text = f"{type(error).__name__}: {reason_of(error)}; please report it; SPECRT_DEBUG=1 shows the traceback"
    return text, INTERNAL_EXIT_CODE


def _system_error(error: OSError, number: int) -> tuple[str, int]:
    """(line, exit code) of a location that cannot be used, or of a wrong path."""
    place = "the working directory" if error.filename is None and _has_no_folder() else error.filename
    named = f"{os.fsdecode(place)}: " if isinstance(place, str | bytes) else ""
    if number in UNUSABLE or place == STDOUT or "temporary directory" in str(error):
        hint = "see where it leads" if place == STDOUT else "make room, or use another place"
        if number in (errno.EMFILE, errno.ENFILE):
            hint = "raise the limit ('ulimit -n')"
        return f"{named}{reason_of(error)}; {hint}", ResourceError.exit_code
    return f"{named}{reason_of(error)}; check the path and its permissions", UsageError.exit_code


def _has_no_folder() -> bool:
    try:
        os.getcwd()
    except OSError:
        return True
    return False
