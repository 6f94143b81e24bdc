"""``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a request."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from specrt.tools.serving.protocol.errors import invalid
from specrt.tools.serving.protocol.fields import Fields

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class ToolUse:
    """The functions that the model may call, in the form of templates. ``parallel`` allows several calls."""

    schemas: list[dict[str, Any]]
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        """Names of the functions."""
        return frozenset(schema["function"]["name"] for schema in self.schemas)


def tool_use_of(fields: Fields) -> ToolUse | None:
    """None without tools, or if none may be called; then the template does not get them. Raises ``ApiError``."""
    given = fields.objects("tools")
    choice = fields.take("tool_choice")
    parallel = fields.flag("parallel_tool_calls", default=True)
    if choice is not None and choice not in ("auto", "none"):
        if choice == "required" or isinstance(choice, dict):
            raise invalid(
                "tool_choice", "forced calls are not supported yet; use auto or none", "unsupported_parameter"
            )
        raise fields.wrong("tool_choice", choice, "'auto' or 'none'")
    if not given:
        if choice == "auto":
            raise invalid("tool_choice", "got 'auto' without tools; leave it out")
        return None
    if len(given) > MAX_TOOLS:
        raise invalid("tools", f"got {len(given)}, expected at most {MAX_TOOLS}")
    schemas = [_schema(tool) for tool in given]
    return None if choice == "none" else ToolUse(schemas, parallel)


def _schema(tool: Fields) -> dict[str, Any]:
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
    if function.flag("strict"):
        raise invalid(function.name("strict"), "it needs structured output, which is not supported yet; leave it out")
    function.end()
    tool.end()
    return {"type": "function", "function": schema}
