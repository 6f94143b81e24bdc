"""Standard output and standard error of a command: they can always encode, and their failures have a name.

What the encoding lacks is written as an escape (``\\u4f60``). A standard output that fails (a full disk, a closed
descriptor) raises an ``OSError`` that names it; a standard error that fails is given up in silence, since nothing is
left to report it on.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import Any, TextIO, cast

STDIN, STDOUT, STDERR = "standard input", "standard output", "standard error"


class Output:
    """A text stream in place of ``sys.stdout`` or ``sys.stderr``.

    It has no ``buffer``, as click would write UTF-8 there where the encoding is ASCII.
    """

    def __init__(self, stream: TextIO, name: str, is_needed: bool) -> None:
        self._stream, self.name, self._is_needed = stream, name, is_needed
        self.encoding: str = stream.encoding or "utf-8"
        self.errors = "backslashreplace"
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=self.errors)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._fail(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        """What is still buffered, and all that comes later, goes nowhere; the interpreter's last flush succeeds."""
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        if self._is_needed:
            raise OSError(error.errno, error.strerror, self.name) from error

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            raise AttributeError(name)
        return getattr(self._stream, name)


def protect_streams() -> None:
    """Put ``Output`` in place of both streams, and something that fails by itself in place of closed descriptors."""
    _open_closed()
    sys.stdout = cast(TextIO, Output(sys.stdout, STDOUT, is_needed=True))
    sys.stderr = cast(TextIO, Output(sys.stderr, STDERR, is_needed=False))


def flush_streams() -> None:
    """Write what is buffered. Raises ``OSError`` that names the standard output."""
    sys.stderr.flush()
    sys.stdout.flush()


def json_text(data: Any) -> str:
    """``data`` as JSON in one line, in characters that the standard output can encode."""
    text = json.dumps(data, ensure_ascii=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return json.dumps(data)
    return text


def _open_closed() -> None:
    """Open the null device on descriptors 0 to 2 that are closed, or the next file opened would get their number.

    It is opened the wrong way round for input and output, so that using them is an error.
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
