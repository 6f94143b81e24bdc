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
    """The functions that the model may call, in the form of templates.

    ``parallel`` allows several calls. With ``is_forced`` the response is one call, of function ``name`` if given.
    With ``is_strict`` the arguments of every call follow the schema.
    """

    schemas: list[dict[str, Any]]
    parallel: bool = True
    is_forced: bool = False
    name: str | None = None
    is_strict: bool = False

    @property
    def names(self) -> frozenset[str]:
        """Names of the functions."""
        return frozenset(schema["function"]["name"] for schema in self.schemas)


def tool_use_of(fields: Fields) -> ToolUse | None:
    """None without tools, or if none may be called; then the template does not get them. Raises ``ApiError``."""
    given = fields.objects("tools")
    choice, name = _choice(fields)
    parallel = fields.flag("parallel_tool_calls", default=True)
    if not given:
        if choice not in (None, "none"):
            raise invalid("tool_choice", f"got {name or choice!r} without tools; leave it out")
        return None
    if len(given) > MAX_TOOLS:
        raise invalid("tools", f"got {len(given)}, expected at most {MAX_TOOLS}")
    schemas = [_schema(tool) for tool in given]
    is_strict = any(schema["function"].pop("strict") for schema in schemas)
    use = ToolUse(schemas, parallel, choice == "required", name, is_strict)
    if name is not None and name not in use.names:
        raise invalid("tool_choice.function.name", f"got {name!r}, expected one of {', '.join(sorted(use.names))}")
    return None if choice == "none" else use


def _choice(fields: Fields) -> tuple[str | None, str | None]:
    """(``tool_choice`` as a word, the name of the function that must be called)."""
    choice = fields.take("tool_choice")
    if choice is None or choice in ("auto", "none", "required"):
        return choice, None
    if not isinstance(choice, dict):
        raise fields.wrong("tool_choice", choice, "'auto', 'none', 'required' or an object that names a function")
    named = Fields(choice, fields.name("tool_choice"))
    if named.take("type") != "function":
        raise invalid(named.name("type"), "expected 'function'")
    function = Fields(named.take("function"), named.name("function"))
    name = function.text("name")
    if name is None:
        raise function.wrong("name", name, "the name of a function")
    function.end()
    named.end()
    return "required", name


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
