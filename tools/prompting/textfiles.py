"""Text that users give in files: UTF-8 with or without a byte order mark, in lines that end with a newline."""

from __future__ import annotations

import codecs
import json
import sys
from pathlib import Path
from typing import Any

from specrt.engines.errors import UsageError

# The longer ones first: UTF-32's little-endian mark starts with UTF-16's.
_OTHER_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


def read_text(path: Path | None) -> str:
    """The text of a file, of standard input for None, without a byte order mark; line ends stay as they are.

    Raises ``UsageError`` for what cannot be read or is not UTF-8.
    """
    name = path or "standard input"
    try:
        data = sys.stdin.buffer.read() if path is None else path.read_bytes()
    except OSError as error:
        raise UsageError(f"{name}: cannot be read as text ({error}); give a file of UTF-8 text") from error
    for mark, encoding in _OTHER_MARKS:
        if data.startswith(mark):
            raise UsageError(f"{name}: cannot be read as text (got {encoding}, expected UTF-8); save it as UTF-8")
    if b"\0" in data:
        raise UsageError(f"{name}: cannot be read as text (got zero bytes, as in UTF-16); save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: cannot be read as text ({error}); give UTF-8 text") from error


def lines_of(text: str) -> list[str]:
    r"""The lines of ``text``, ended by ``\n`` or ``\r\n`` alone: JSON strings may hold other separators (U+2028)."""
    return [line.removesuffix("\r") for line in text.split("\n")]


def without_final_newline(text: str) -> str:
    """``text`` without one newline at its end, which editors add."""
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def parsed_json(text: str, name: str, expected: str) -> Any:
    """``text`` as JSON. Raises ``UsageError`` that states what was ``expected`` in ``name``."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name}: not JSON ({error}); expected {expected}") from error
