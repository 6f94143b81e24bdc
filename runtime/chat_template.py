"""Chat messages to text, in a sandbox, as transformers' ``apply_chat_template`` does it."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from reprlib import repr as short_repr
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specrt.engines.errors import UsageError


def plain_message(item: Any, index: int) -> dict[str, Any]:
    """A message as plain JSON data, without keys of value None; reasoning under each name that templates read."""
    try:
        message = json.loads(json.dumps({key: value for key, value in item.items() if value is not None}))
        body = message.get("content", message.get("tool_calls"))
        if not (isinstance(message["role"], str) and isinstance(body, str | list)):
            raise TypeError
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"prompt: message {index} is {short_repr(item)}, expected a role and a content; "
            "write it like {'role': 'user', 'content': 'text'}"
        ) from error
    for name in ("reasoning_content", "thinking", "reasoning"):
        if name in message:
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return dict(message)


class _GenerationBlocks(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it renders its body, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


@lru_cache
def compiled_template(source: str) -> Template:
    """A chat template in the sandbox, with the settings, the filter and the functions that transformers gives it."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=raise_exception, strftime_now=lambda form: datetime.now().strftime(form))
    return environment.from_string(source)
