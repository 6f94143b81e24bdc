"""Incremental parsing of tool calls in a model's text.

A call is reported once, when complete, and only if it is JSON that names one of the tools. All other text is content;
only white space around calls is dropped. The result depends on the text alone, not on its division into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from specrt.serving.protocol.tool_json import ToolCall, calls_of, end_of_json

Delta = str | ToolCall


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


def tool_parser(form: Format, names: Collection[str]) -> MarkedCalls | WholeText:
    """A parser for one text. ``names`` are the names of the tools."""
    return WholeText(form, names) if form.is_whole_text else MarkedCalls(form, names)


class MarkedCalls:
    """Calls that begin with a marker, anywhere in the text.

    After a mistral marker there may be a name and ``[ARGS]`` before the arguments.
    """

    def __init__(self, form: Format, names: Collection[str]) -> None:
        self._form, self._names = form, names
        self._text = ""  # not decided yet
        self._is_open = False  # an object or array has begun; wait for its end
        self._is_after_call = False  # an end marker may follow, and white space that is not content

    def push(self, text: str) -> list[Delta]:
        """Add a piece of the text; return the deltas that are now certain."""
        if self._is_open and not _may_close(text):
            self._text += text
            return []
        return self._scan(text, is_end=False)

    def finish(self) -> list[Delta]:
        """End the text; return the remaining deltas."""
        return self._scan("", is_end=True)

    def _scan(self, text: str, is_end: bool) -> list[Delta]:
        self._text += text
        deltas: list[Delta] = []
        while self._text and (found := self._next(is_end)) is not None:
            deltas += found
        return deltas

    def _next(self, is_end: bool) -> list[Delta] | None:
        """The next deltas; None if more text is needed."""
        if self._is_after_call:
            return self._skip_end(is_end)
        mark = self._form.begin[0]
        start = self._text.find(mark)
        if start < 0:
            held = 0 if is_end else _num_held(self._text, mark)
            return [self._take(len(self._text) - held)] if held < len(self._text) else None
        if start > 0 and (lead := self._text[:start].rstrip()):
            return [self._take(len(lead))]
        return self._calls(start + len(mark), is_end)

    def _calls(self, start: int, is_end: bool) -> list[Delta] | None:
        """The calls that begin at ``start``, after a marker; the marker as content if there are none."""
        name = None
        if self._form.begin[0] == "[TOOL_CALLS]" and (match := _NAME.match(self._text, start)):
            name, start = match[1], match.end()
        start += len(self._text[start:]) - len(self._text[start:].lstrip())
        if start == len(self._text) or self._text[start] not in "[{":
            if not is_end and (start == len(self._text) or _may_be_name(self._text[start:], self._form)):
                return None
            return [self._take(start)]
        end = end_of_json(self._text, start)
        self._is_open = end is None
        if end is None:
            return [self._take(start + 1)] if is_end else None
        calls = calls_of(self._text[start:end], self._names, name)
        if calls is None:
            return [self._take(end)]
        self._text, self._is_after_call = self._text[end:], True
        return list(calls)

    def _skip_end(self, is_end: bool) -> list[Delta] | None:
        """Skip white space and one end marker after a call."""
        rest = self._text.lstrip()
        for mark in self._form.end:
            if rest.startswith(mark):
                rest = rest[len(mark) :].lstrip()
                break
            if mark.startswith(rest) and not is_end:
                return None
        if not rest and not is_end:
            return None
        self._text, self._is_after_call = rest, False
        return []

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        return taken


class WholeText:
    """A text of calls only, with an optional marker before them and separators between them."""

    def __init__(self, form: Format, names: Collection[str]) -> None:
        self._form, self._names = form, names
        self._text = ""
        self._is_open = False
        self._is_content = False

    def push(self, text: str) -> list[Delta]:
        """Add a piece of the text. It is held while all of it may be calls."""
        self._text += text
        if self._is_open and not _may_close(text):
            return []
        self._is_content = self._is_content or not self._may_be_calls()
        return self._take() if self._is_content else []

    def finish(self) -> list[Delta]:
        """End the text; return the remaining deltas."""
        calls = None if self._is_content else self._all_calls()
        return self._take() if calls is None else list(calls)

    def _take(self) -> list[Delta]:
        taken, self._text = self._text, ""
        return [taken] if taken else []

    def _body(self) -> str:
        """The text without a leading marker."""
        body = self._text.lstrip()
        mark = next((mark for mark in self._form.begin if body.startswith(mark)), "")
        return body[len(mark) :].lstrip()

    def _may_be_calls(self) -> bool:
        body = self._body()
        if not body or any(mark.startswith(self._text.lstrip()) for mark in self._form.begin):
            return True
        if body[0] not in "[{":
            return False
        end = end_of_json(body, 0)
        self._is_open = end is None
        return end is None or calls_of(body[:end], self._names) is not None

    def _all_calls(self) -> list[ToolCall] | None:
        body, calls = self._body(), list[ToolCall]()
        while body:
            end = end_of_json(body, 0) if body[0] in "[{" else None
            found = None if end is None else calls_of(body[:end], self._names)
            if found is None:
                return None
            calls += found
            body = body[end:].lstrip()
            mark = next((mark for mark in self._form.end if body.startswith(mark)), "")
            body = body[len(mark) :].lstrip()
        return calls or None


_NAME = re.compile(r"\s*([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?(?=\s*\{)")
_NAME_MAY_COME = re.compile(r"[A-Za-z0-9_.-]{1,64}(?:\[[A-Z_]*(?:\]\w*)?)?(?:\[[A-Z]*\]?)?\s*")


def _may_close(text: str) -> bool:
    return "}" in text or "]" in text


def _may_be_name(rest: str, form: Format) -> bool:
    """Whether ``rest`` may become a name with arguments in mistral's format."""
    return form.begin[0] == "[TOOL_CALLS]" and _NAME_MAY_COME.fullmatch(rest) is not None


def _num_held(text: str, mark: str) -> int:
    """Length of the end that may belong to a marker: its beginning, and white space before it."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    begun = next((size for size in sizes if text.endswith(mark[:size])), 0)
    return len(text) - len(text[: len(text) - begun].rstrip())
