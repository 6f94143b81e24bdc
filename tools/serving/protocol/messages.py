"""Chat messages of a request, in the form that chat templates expect."""

from __future__ import annotations

import json
from typing import Any

from specrt.serving.protocol.errors import invalid
from specrt.serving.protocol.fields import Fields

ROLES = ("system", "developer", "user", "assistant", "tool")
_NO_MEANING = ("refusal", "audio", "function_call", "annotations")  # null in messages that clients send back


def messages_of(fields: Fields) -> list[dict[str, Any]]:
    """The ``messages``, at least one. Text parts are joined, tool calls' arguments are parsed. Raises ``ApiError``."""
    given = fields.objects("messages")
    if not given:
        raise invalid("messages", "got none, expected a list of at least one message")
    return [_message(message) for message in given]


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.one_of("role", ROLES)
    if role is None:
        raise invalid(fields.name("role"), f"got none, expected one of {', '.join(ROLES)}")
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    content = _content(fields)
    calls = _tool_calls(fields) if role == "assistant" else None
    if content is None and not calls:
        raise invalid(fields.name("content"), "got none, expected a string or a list of text parts")
    message["content"] = content or ""
    if calls:
        message["tool_calls"] = calls
    names = ["name", *(["tool_call_id"] if role == "tool" else []), *(["reasoning_content"] * (role == "assistant"))]
    message.update({name: value for name in names if (value := fields.text(name)) is not None})
    for name in _NO_MEANING:
        if (value := fields.take(name)) not in (None, []):
            raise fields.wrong(name, value, "null")
    fields.end()
    return message


def _content(fields: Fields) -> str | None:
    content = fields.take("content")
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise fields.wrong("content", content, "a string or a list of text parts")
    return "\n".join(
        _text_part(Fields(part, f"{fields.name('content')}[{index}]")) for index, part in enumerate(content)
    )


def _text_part(part: Fields) -> str:
    kind = part.take("type")
    if kind not in ("text", "input_text"):
        raise part.wrong("type", kind, "'text', the only kind that this server takes")
    text = part.text("text")
    if text is None:
        raise invalid(part.name("text"), "got none, expected a string")
    part.end()
    return text


def _tool_calls(fields: Fields) -> list[dict[str, Any]]:
    return [_tool_call(call) for call in fields.objects("tool_calls") or []]


def _tool_call(call: Fields) -> dict[str, Any]:
    """A call in the form that templates expect. Arguments that are JSON become the value."""
    call_id = call.text("id")
    call.one_of("type", ("function",))
    call.whole("index", 0)  # clients send back what they got in streams
    function = Fields(call.take("function"), call.name("function"))
    name, arguments = function.text("name"), function.of_kind("arguments", (str, dict), "JSON text, or an object")
    if name is None:
        raise invalid(function.name("name"), "got none, expected the name of a function")
    function.end()
    call.end()
    parsed: Any = arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = arguments
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": parsed}}
