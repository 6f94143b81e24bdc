"""Standard output and standard error of a command, which can encode any text and whose failures name the stream.

Characters that the encoding lacks are written as escapes (``\\u4f60``). A standard output that fails (a full disk, a
closed descriptor) raises an ``OSError`` that names it. A standard error that fails is ignored, since there is nowhere
left to report it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO, cast

STDIN, STDOUT, STDERR = "standard input", "standard output", "standard error"


class Output:
    """A text stream in place of ``sys.stdout`` or ``sys.stderr``.

    It has no ``buffer``: click would write UTF-8 to it where the encoding is ASCII.
    """

    def __init__(self, stream: TextIO, name: str, is_needed: bool) -> None:
        self._stream, self.name, self._is_needed = stream, name, is_needed
        self._failure: OSError | None = None
        self.encoding: str = stream.encoding or "utf-8"
        self.errors = "backslashreplace"
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=self.errors)

    def write(self, text: str) -> int:
        if text != "":  # click probes a stream with an empty text, and ignores what that raises
            self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def give_up(self) -> None:
        """Raise nothing from now on: the process is ending, and a failure was already reported."""
        self._is_needed = False
        with suppress(OSError):
            self.flush()

    def _try(self, action: Callable[..., object], *arguments: str) -> None:
        """Call ``action``. After a failure, raise it at every call, since a caller may ignore one error."""
        if self._failure is None:
            try:
                action(*arguments)
            except OSError as error:
                self._failure = OSError(error.errno, error.strerror, self.name)
                self._lead_nowhere()
        if self._failure is not None and self._is_needed:
            raise self._failure

    def _lead_nowhere(self) -> None:
        """Discard what is still buffered, so that the interpreter's last flush succeeds."""
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            raise AttributeError(name)
        return getattr(self._stream, name)


def protect_streams() -> None:
    """Replace both streams by ``Output``, and closed descriptors by ones that fail when used."""
    _open_closed()
    sys.stdout = cast(TextIO, Output(sys.stdout, STDOUT, is_needed=True))
    sys.stderr = cast(TextIO, Output(sys.stderr, STDERR, is_needed=False))


def flush_streams() -> None:
    """Write what is buffered. Raises ``OSError`` where the standard output has failed, now or before."""
    sys.stderr.flush()
    sys.stdout.flush()


def give_up_streams() -> None:
    """Flush at the end of the process; what cannot be written is discarded silently."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Output):
            stream.give_up()


def json_text(data: Any) -> str:
    """``data`` as JSON in one line, in characters that the standard output can encode."""
    text = json.dumps(data, ensure_ascii=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return json.dumps(data)
    return text


def _open_closed() -> None:
    """Open the null device on closed descriptors 0 to 2, since the next file opened would get their number.

    It is opened for writing as input and for reading as output, so that using them is an error.
    """
    flags = (os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)
    for number, (name, flag) in enumerate(zip(("stdin", "stdout", "stderr"), flags, strict=True)):
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            stream = open(_opened(number, flag), mode, encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def _opened(number: int, flag: int) -> int:
    """The null device, as descriptor ``number`` where that is free."""
    try:
        os.fstat(number)
    except OSError:
        opened = os.open(os.devnull, flag)
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)
        os.set_inheritable(number, True)
        return number
    return os.open(os.devnull, flag)
