"""``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a request."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from specrt.serving.protocol.errors import invalid
from specrt.serving.protocol.fields import Fields

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class ToolUse:
    """The functions of a request, in the form of templates, and those that the model may call, ``names``.

    ``parallel`` allows several calls. With ``is_forced`` the response is calls only: one or more of any function, or
    one of a function that is named. With ``is_strict`` the arguments of every call follow the schema.
    """

    schemas: list[dict[str, Any]]
    names: frozenset[str]
    parallel: bool = True
    is_forced: bool = False
    is_strict: bool = False

    @property
    def is_restricted(self) -> bool:
        """Whether the template shows functions that may not be called."""
        return any(schema["function"]["name"] not in self.names for schema in self.schemas)

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The schemas of the functions that may be called."""
        return [schema for schema in self.schemas if schema["function"]["name"] in self.names]


@dataclass(frozen=True)
class _Choice:
    """``tool_choice``: its ``mode``, and the names that it allows, by the paths of their fields; None for all."""

    mode: str | None
    names: dict[str, str] | None = None
    is_one: bool = False


def tool_use_of(fields: Fields) -> ToolUse | None:
    """None without tools, or if none may be called; then the template does not get them. Raises ``ApiError``."""
    given = fields.objects("tools")
    choice = _choice(fields)
    parallel = fields.flag("parallel_tool_calls", default=True)
    if not given:
        if choice.mode not in (None, "none"):
            got = next(iter((choice.names or {}).values()), choice.mode)
            raise invalid("tool_choice", f"got {got!r} without tools; leave it out")
        return None
    if len(given) > MAX_TOOLS:
        raise invalid("tools", f"got {len(given)}, expected at most {MAX_TOOLS}")
    schemas = [_schema(tool) for tool in given]
    is_strict = any([schema["function"].pop("strict") for schema in schemas])  # a list: all of them are removed
    known = frozenset(schema["function"]["name"] for schema in schemas)
    for path, name in (choice.names or {}).items():
        if name not in known:
            raise invalid(path, f"got {name!r}, expected one of {', '.join(sorted(known))}")
    names = known if choice.names is None else frozenset(choice.names.values())
    use = ToolUse(schemas, names, parallel and not choice.is_one, choice.mode == "required", is_strict)
    return None if choice.mode == "none" else use


def _choice(fields: Fields) -> _Choice:
    choice = fields.take("tool_choice")
    if choice is None or choice in ("auto", "none", "required"):
        return _Choice(choice)
    if not isinstance(choice, dict):
        raise fields.wrong("tool_choice", choice, "'auto', 'none', 'required' or an object that names functions")
    chosen = Fields(choice, fields.name("tool_choice"))
    kind = chosen.one_of("type", ("function", "allowed_tools"))
    if kind is None:
        raise chosen.wrong("type", kind, "'function' or 'allowed_tools'")
    found = _allowed(chosen) if kind == "allowed_tools" else _Choice("required", dict([_named(chosen)]), is_one=True)
    chosen.end()
    return found


def _allowed(chosen: Fields) -> _Choice:
    """OpenAI's ``allowed_tools``: a mode and some of the tools."""
    allowed = Fields(chosen.take("allowed_tools"), chosen.name("allowed_tools"))
    mode = allowed.one_of("mode", ("auto", "required"))
    if mode is None:
        raise allowed.wrong("mode", mode, "'auto' or 'required'")
    names = dict[str, str]()
    for tool in allowed.objects("tools") or []:
        if tool.take("type") != "function":
            raise invalid(tool.name("type"), "expected 'function'")
        names.update([_named(tool)])
        tool.end()
    if not names:
        raise invalid(allowed.name("tools"), "got none, expected at least one of the tools")
    allowed.end()
    return _Choice(mode, names)


def _named(fields: Fields) -> tuple[str, str]:
    """(path of the name, name) of ``function``."""
    function = Fields(fields.take("function"), fields.name("function"))
    name = function.text("name")
    if name is None:
        raise function.wrong("name", name, "the name of a function")
    function.end()
    return function.name("name"), name


def _schema(tool: Fields) -> dict[str, Any]:
    """The tool in the form of templates, and ``strict``."""
    if tool.take("type") != "function":
        raise invalid(tool.name("type"), "expected 'function'")
    function = Fields(tool.take("function"), tool.name("function"))
    name = function.text("name")
    if name is None or not _NAME.fullmatch(name):
        raise function.wrong("name", name, "a name of at most 64 letters, digits, '_', '-' and '.'")
    schema: dict[str, Any] = {"name": name}
    if (description := function.text("description")) is not None:
        schema["description"] = description
    parameters = function.of_kind("parameters", dict, "a JSON schema")
    schema["parameters"] = {"type": "object", "properties": {}} if parameters is None else parameters
    schema["strict"] = function.flag("strict")
    function.end()
    tool.end()
    return {"type": "function", "function": schema}
