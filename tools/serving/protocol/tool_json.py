"""The JSON of tool calls."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """A tool call. ``arguments`` is JSON in a string, as in OpenAI's API."""

    name: str
    arguments: str


def end_of_json(text: str, start: int) -> int | None:
    """The end of the object or array that begins at ``start``; None if it is incomplete."""
    depth, in_string, is_escaped = 0, False, False
    for index in range(start, len(text)):
        char = text[index]
        if in_string:
            in_string = is_escaped or char != '"'
            is_escaped = char == "\\" and not is_escaped
        elif char == '"':
            in_string = True
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
            if depth == 0:
                return index + 1
    return None


def calls_of(text: str, names: Collection[str], name: str | None = None) -> list[ToolCall] | None:
    """The calls in a JSON text: one, or a list. ``name`` is given if the text holds only the arguments.

    None if it is not JSON, or a call does not name a tool.
    """
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if name is not None:
        parsed = {"name": name, "arguments": parsed}
    items = parsed if isinstance(parsed, list) else [parsed]
    calls = [call for item in items if (call := _call_of(item, names)) is not None]
    return calls if calls and len(calls) == len(items) else None


def _call_of(item: Any, names: Collection[str]) -> ToolCall | None:
    name = item.get("name") if isinstance(item, dict) else None
    if not isinstance(name, str) or name not in names:
        return None
    arguments = item.get("arguments", item.get("parameters", {}))
    return ToolCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))
