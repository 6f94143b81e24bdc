"""Contents and calls from the events of a tool parser."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from specrt.serving.protocol.tool_parsers import FORMATS, CallArguments, CallBegin, CallEnd, Event, ToolParser


class Call(NamedTuple):
    """The joined events of a call."""

    name: str
    arguments: str
    is_complete: bool = True


def joined(events: list[Event]) -> list[str | Call]:
    """The contents and calls, in order."""
    found: list[str | Call] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, str):
            found[-1:] = [last + event] if isinstance(last, str) else [*found[-1:], event]
        elif isinstance(event, CallBegin):
            found.append(Call(event.name, "", False))
        else:
            assert isinstance(last, Call) and not last.is_complete, "only after a beginning"
            is_end, text = isinstance(event, CallEnd), event.text if isinstance(event, CallArguments) else ""
            found[-1] = Call(last.name, last.arguments + text, is_end)
    return found


def parsed(form: str, text: str, names: Collection[str]) -> list[str | Call]:
    """What is in a whole text."""
    parser = ToolParser(FORMATS[form], names)
    return joined([*parser.push(text), *parser.finish()])
