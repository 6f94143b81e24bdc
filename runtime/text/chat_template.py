"""Chat messages to text, in a sandbox, as transformers' ``apply_chat_template`` does it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError
from jinja2 import nodes as jinja_nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from specrt.engines.errors import UsageError, one_line
from specrt.runtime.text.messages import REASONING, ChatOptions, checked_message

DEFAULT, TOOL_USE = "default", "tool_use"  # transformers' names for the templates of a model with several
_MARK = "CONTINUED_MESSAGE_ENDS_HERE "  # ends with a space, to detect templates that strip the message


class ChatTemplates:
    """The chat templates of a bundle, by name (most models have ``default`` only), and their common variables.

    ``variables`` is the tokenizer's map of special tokens: ``bos_token``, ``pad_token`` and so on.
    """

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str]) -> None:
        self._sources, self._variables = dict(sources), dict(variables)

    def render(self, messages: Sequence[Any], options: ChatOptions) -> str:
        """The text of ``messages``. Raises ``UsageError``, also for any error that the template raises."""
        chat = [checked_message(item, index) for index, item in enumerate(messages)]
        source = self.source(options)
        mark = _mark_end(chat, options.continued_field, source) if options.continued_field else None
        variables = {**self._variables, **options.variables, "messages": chat}
        try:
            text = compiled_template(source).render(variables)
        except Exception as error:  # a template is third-party code and may raise any error
            reason = one_line(error, limit=1000)
            raise UsageError(
                f"chat template: {reason} ({type(error).__name__}); change the messages, or pass plain text (--raw)"
            ) from error
        if any(isinstance(m.get("content"), list) and str(m["content"]) in text for m in chat):
            warnings.warn(
                "the chat template writes a list of content parts as Python prints it; give the content as text",
                stacklevel=2,
            )
        return text if mark is None else _cut_at_mark(text, mark)

    def source(self, options: ChatOptions) -> str:
        """The template that ``options`` select: by name, else ``tool_use`` if tools are given, else ``default``."""
        name = options.chat_template_name
        if name is None:
            name = TOOL_USE if options.variables["tools"] is not None and TOOL_USE in self._sources else DEFAULT
        if name in self._sources:
            return self._sources[name]
        if not self._sources:
            raise UsageError("prompt: got messages, but the bundle has no chat template; pass the prompt as a string")
        if options.chat_template_name is not None:
            what = f"got {name!r}"
        else:
            what = "got none, and the bundle has no default one"
        raise UsageError(f"chat_template_name: {what}; expected one of {', '.join(sorted(self._sources))}")


def _mark_end(chat: list[dict[str, Any]], field: str, source: str) -> str:
    """Append the marker to the last message's ``field`` (reasoning: under each of its names); return its text."""
    value = chat[-1].get(field)
    if value is None:
        raise UsageError(
            f"continue_final_message: the last message has no {field!r} to continue; end the messages with the "
            "assistant's text"
        )
    fields = [name for name in REASONING if chat[-1].get(name) == value] if field in REASONING else [field]
    if not any(name in source for name in fields):
        raise UsageError(f"continue_final_message: the chat template does not read {field!r}; continue another field")
    if isinstance(value, str):
        chat[-1].update(dict.fromkeys(fields, value + _MARK))
        return value
    for part in reversed(value):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            continued: str = part["text"]
            part["text"] = continued + _MARK
            return continued
    raise UsageError("continue_final_message: the last message has no text to continue; end it with a text part")


def _cut_at_mark(text: str, continued: str) -> str:
    """``text`` up to the end of the continued message, without trailing space if the template strips it."""
    mark = _MARK.strip()
    if continued.strip() not in text or mark not in text:
        raise UsageError(
            "continue_final_message: the chat template leaves out or changes the last message, so it cannot be "
            "continued; end it with a plain assistant message"
        )
    place = text.rindex(mark)
    return text[:place] if text[place:].startswith(_MARK) else text[:place].rstrip()


class _GenerationBlocks(Extension):
    """``{% generation %}`` marks the assistant's text for training. Here it renders its body, in a separate scope."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> jinja_nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja_nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


class _PlainNamespace(Namespace):
    """``namespace()`` without attributes that begin with an underscore, which give access to Python internals."""

    def __init__(*args: Any, **attributes: Any) -> None:  # as in jinja2: ``self`` is a name like any other
        self, *rest = args
        values = dict(*rest, **attributes)
        for name in values:
            _check_attribute(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: it begins with an underscore")


class _PlainDict:
    """``dict()`` and ``dict.fromkeys``, without the rest of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache
def compiled_template(source: str) -> Template:
    """A chat template in the sandbox, with the same settings, filter and functions as in transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda form: datetime.now().strftime(form),
        dict=_PlainDict(),
        namespace=_PlainNamespace,
    )
    return environment.from_string(source)
