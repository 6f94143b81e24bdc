"""Incremental parsing of tool calls in a model's text.

A call begins when its name is known to be that of a tool and the brace that opens its arguments has come. From there on
the text up to the matching brace is its arguments, as the model writes them. All other text is content; only white
space, markers and separators around calls are dropped. The joined events depend on the text alone, not on its pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from specrt.serving.protocol.tool_json import Nesting, NotACall, Opened, head_of

_LONG = 4096  # characters; a beginning of this length is read again only after a brace


@dataclass(frozen=True)
class CallBegin:
    """A call of tool ``name`` has begun."""

    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next piece of the arguments of a call."""

    text: str


@dataclass(frozen=True)
class CallEnd:
    """The arguments of a call are complete."""


# A string is content
Event = str | CallBegin | CallArguments | CallEnd


@dataclass(frozen=True)
class Format:
    """The format of calls of a family of models.

    With ``is_whole_text`` a text consists of calls only, or has none. ``begin`` are the markers before a call, ``end``
    those that may follow it. The markers in ``special`` may be special tokens, which must then be visible.
    ``id_length`` is the length of an id, which some templates check.
    """

    begin: tuple[str, ...]
    end: tuple[str, ...] = ()
    is_whole_text: bool = False
    special: tuple[str, ...] = ()
    id_length: int = 24


FORMATS = {
    "hermes": Format(("<tool_call>",), ("</tool_call>",), special=("<tool_call>", "</tool_call>")),
    "mistral": Format(("[TOOL_CALLS]",), special=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), id_length=9),
    "llama3_json": Format(("<|python_tag|>",), (";",), is_whole_text=True, special=("<|python_tag|>",)),
    "json": Format(("```json", "```"), ("```", ";", ","), is_whole_text=True),
}


def format_of_template(template: str) -> str:
    """The name of the format of calls in a chat template; ``json`` if it has no markers."""
    for mark, name in (("<tool_call>", "hermes"), ("[TOOL_CALLS]", "mistral"), ("<|python_tag|>", "llama3_json")):
        if mark in template:
            return name
    return "llama3_json" if '"parameters"' in template and "<|start_header_id|>" in template else "json"


class ToolParser:
    """The events of one text. ``names`` are the names of the tools.

    Each state takes text from the front and returns events, or None if more text is needed.
    """

    def __init__(self, form: Format, names: Collection[str]) -> None:
        self._form, self._names = form, names
        self._text = ""  # not decided yet
        self._nesting = Nesting()
        self._in_object = self._in_list = False  # whether the arguments are in an object, and the call in a list
        self._state: Callable[[bool], list[Event] | None] = self._opening if form.is_whole_text else self._content

    def push(self, text: str) -> list[Event]:
        """Add a piece of the text; return the events that are now certain."""
        self._text += text
        is_held = self._state in (self._opening, self._item) and len(self._text) > _LONG
        return [] if is_held and not {"{", "}"}.intersection(text) else self._run(is_end=False)

    def finish(self) -> list[Event]:
        """End the text; return the remaining events. Arguments that are not complete get no end."""
        return self._run(is_end=True)

    def _run(self, is_end: bool) -> list[Event]:
        events: list[Event] = []
        while self._text and (found := self._state(is_end)) is not None:
            events += found
        return events

    def _content(self, is_end: bool) -> list[Event] | None:
        """Content, up to a marker."""
        if self._form.is_whole_text:
            return [self._take(len(self._text))]
        mark = self._form.begin[0]
        start = self._text.find(mark)
        if start < 0:
            held = 0 if is_end else _num_held(self._text, mark)
            return [self._take(len(self._text) - held)] if held < len(self._text) else None
        if lead := self._text[:start].rstrip():
            return [self._take(len(lead))]
        self._state = self._opening
        return []

    def _opening(self, is_end: bool) -> list[Event] | None:
        """White space, the marker, and the beginning of a call or of a list of calls."""
        at = self._after_marker(is_end)
        if self._has_names and (named := _NAME.match(self._text, at)):
            return self._begin(named[1], named.end(), in_object=False)
        rest = self._text[at : at + 1]
        if rest == "[" and (first := _after_space(self._text, at + 1)) < len(self._text):
            self._in_list, at = True, first
            rest = self._text[at]
        if rest == "{":
            return self._object(at, is_end)
        may_come = rest in ("", "[") or (self._has_names and _NAME_MAY_COME.fullmatch(self._text, at) is not None)
        return None if may_come and not self._in_list and not is_end else self._give_up(at)

    def _after_marker(self, is_end: bool) -> int:
        """The index after the marker and white space; the end of the text while it may become a marker."""
        start = _after_space(self._text, 0)
        if not is_end and any(mark.startswith(self._text[start:]) for mark in self._form.begin):
            return len(self._text)
        start += next((len(mark) for mark in self._form.begin if self._text.startswith(mark, start)), 0)
        return _after_space(self._text, start)

    def _item(self, is_end: bool) -> list[Event] | None:
        """A further call, in a list or after a separator."""
        return self._object(0, is_end)

    def _object(self, start: int, is_end: bool) -> list[Event] | None:
        """A call that is an object, with its name and arguments."""
        try:
            found = head_of(self._text, start, self._names)
        except NotACall:
            return self._give_up(start + 1)
        if found is None:
            self._in_list = self._in_list and self._state == self._item
            return self._give_up(start + 1) if is_end else None
        if isinstance(found, Opened):
            return self._begin(found.name, found.start, in_object=True)
        self._text, self._state = self._text[found.end :], self._after
        return [CallBegin(found.name), CallArguments(found.arguments), CallEnd()]

    def _begin(self, name: str, start: int, in_object: bool) -> list[Event]:
        if name not in self._names:
            return self._give_up(start)
        self._text, self._nesting = self._text[start:], Nesting()
        self._in_object, self._state = in_object, self._arguments
        return [CallBegin(name)]

    def _give_up(self, length: int) -> list[Event]:
        """There is no call: the next ``length`` characters are content, and with ``is_whole_text`` all the rest is."""
        self._in_list, self._state = False, self._content
        return [self._take(length)] if length else []

    def _arguments(self, is_end: bool) -> list[Event]:
        end = self._nesting.end(self._text)
        if end is None:
            return [CallArguments(self._take(len(self._text)))]
        self._state = self._object_end if self._in_object else self._after
        return [CallArguments(self._take(end)), CallEnd()]

    def _object_end(self, is_end: bool) -> list[Event]:
        """The brace after the arguments. It may be missing; members before it have no meaning."""
        self._text = self._text.lstrip()
        if self._text.startswith(","):
            self._nesting, self._state = Nesting(depth=1), self._members
        elif self._text:
            self._text, self._state = self._text.removeprefix("}"), self._after
        return []

    def _members(self, is_end: bool) -> list[Event]:
        end = self._nesting.end(self._text)
        self._text = "" if end is None else self._text[end:]
        if end is not None:
            self._state = self._after
        return []

    def _after(self, is_end: bool) -> list[Event] | None:
        """After a call: white space, separators, an end marker, or the next call. Its end is not content."""
        self._text = rest = self._text.lstrip()
        if not rest:
            return []
        if self._in_list and rest[0] in ",]":
            return self._in_list_after(rest, is_end)
        self._in_list = False
        if mark := next((mark for mark in self._form.end if rest.startswith(mark)), ""):
            self._text = rest[len(mark) :]
            self._state = self._after if self._form.is_whole_text else self._spaces
        elif any(mark.startswith(rest) for mark in self._form.end):
            self._text = "" if is_end else rest
            return [] if is_end else None
        elif self._form.is_whole_text and rest[0] in "[{":
            self._state = self._item if rest[0] == "{" else self._opening
        else:
            self._state = self._content
        return []

    def _in_list_after(self, rest: str, is_end: bool) -> list[Event] | None:
        start = _after_space(rest, 1)
        if rest[0] == "]":
            self._in_list, self._text = False, rest[1:]
        elif start < len(rest):
            self._in_list = rest[start] == "{"
            self._text, self._state = rest[start:], self._item if self._in_list else self._content
        else:
            self._text = "" if is_end else rest
            return [] if is_end else None
        return []

    def _spaces(self, is_end: bool) -> list[Event]:
        self._text = self._text.lstrip()
        if self._text:
            self._state = self._content
        return []

    @property
    def _has_names(self) -> bool:
        """Whether a name may come before the arguments, as in mistral's format."""
        return self._form.begin[0] == "[TOOL_CALLS]"

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        return taken


_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
_NAME_MAY_COME = re.compile(r"[A-Za-z0-9_.-]{1,64}(?:\[[A-Z_]*(?:\]\w*)?)?(?:\[[A-Z]*\]?)?\s*")


def _after_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return start if found is None else found.end()


def _num_held(text: str, mark: str) -> int:
    """Length of the end that may belong to a marker: its beginning, and white space before it."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    begun = next((size for size in sizes if text.endswith(mark[:size])), 0)
    return len(text) - len(text[: len(text) - begun].rstrip())
