"""The JSON of tool calls, read while it arrives."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, NamedTuple

_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SCALAR = re.compile(r"[^\s,}\]]+(?=[\s,}\]])")
_ARGUMENTS = ("arguments", "parameters")


class NotACall(Exception):
    """The text cannot become a call of one of the tools."""


class Opened(NamedTuple):
    """The arguments of a call of ``name`` begin at ``start``."""

    name: str
    start: int


class Whole(NamedTuple):
    """A complete call, which ends at ``end``. ``arguments`` is JSON."""

    name: str
    arguments: str
    end: int


class Nesting:
    """Finds the end of an object or array that arrives in pieces. ``depth`` is that of the brackets before."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._in_string, self._is_escaped = depth, False, False

    def end(self, text: str, start: int = 0) -> int | None:
        """Add ``text[start:]``; return the index after the last bracket in ``text``, or None if it has not come."""
        for index in range(start, len(text)):
            char = text[index]
            if self._in_string:
                self._in_string = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == '"':
                self._in_string = True
            elif char in "[{":
                self._depth += 1
            elif char in "]}":
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        return None


def head_of(text: str, start: int, names: Collection[str]) -> Opened | Whole | None:
    """The call whose object begins at ``start``, up to the brace that opens its arguments; None if more text is needed.

    Arguments that come before the name, and those that are no object, are part of a ``Whole``. Raises ``NotACall``.
    """
    name = arguments = None
    at = _space(text, start + 1)
    while at < len(text) and text[at] != "}":
        if (member := _member(text, at)) is None:
            return None
        key, at = member
        if key in _ARGUMENTS and name is not None and text[at] == "{":
            return Opened(name, at)
        if (end := _value_end(text, at)) is None:
            return None
        if key == "name":
            name = _name(text[at:end], names)
        elif key in _ARGUMENTS:
            value = _parsed(text[at:end])
            arguments = value if isinstance(value, str) else text[at:end]
        at = _space(text, end)
        if at < len(text) and text[at] == ",":
            at = _space(text, at + 1)
        elif at < len(text) and text[at] != "}":
            raise NotACall
    if at == len(text):
        return None
    if name is None:
        raise NotACall
    return Whole(name, "{}" if arguments is None else arguments, at + 1)


def _member(text: str, at: int) -> tuple[str, int] | None:
    """(key, the beginning of its value)."""
    if text[at] != '"':
        raise NotACall
    key = _STRING.match(text, at)
    if key is None or (colon := _space(text, key.end())) == len(text):
        return None
    if text[colon] != ":":
        raise NotACall
    begin = _space(text, colon + 1)
    return None if begin == len(text) else (str(_parsed(key[0])), begin)


def _value_end(text: str, at: int) -> int | None:
    if text[at] in "[{":
        return Nesting().end(text, at)
    found = (_STRING if text[at] == '"' else _SCALAR).match(text, at)
    return None if found is None else found.end()


def _name(value: str, names: Collection[str]) -> str:
    name = _parsed(value)
    if not isinstance(name, str) or name not in names:
        raise NotACall
    return name


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError) as error:
        raise NotACall from error


def _space(text: str, at: int) -> int:
    """The index after white space."""
    found = _SPACE.match(text, at)
    return at if found is None else found.end()
