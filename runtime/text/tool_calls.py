"""Grammars that force a tool call, in the formats of several model families."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specrt.engines.errors import UsageError
from specrt.runtime.structured import json_rule

_Function = tuple[str, str]  # its name, and the Lark rule of its arguments


def tool_call_grammar(
    form: str, tools: Sequence[Mapping[str, Any]], special_tokens: Mapping[str, int], name: str | None = None
) -> str:
    """A Lark grammar (option ``grammar``) of one call: of tool ``name``, or of any of ``tools``.

    ``form`` is one of ``FORMS``. ``tools`` are functions' schemas as for chat templates, ``special_tokens`` those of
    the tokenizer (``TextCodec.special_tokens``). Markers that are special tokens are generated as such; with option
    ``visible_special_tokens`` they are part of the text. Raises ``UsageError`` for another form, for a tool without a
    name, and for a ``name`` that no tool has.
    """
    if form not in FORMS:
        raise UsageError(f"tool call format: got {form!r}, expected one of {', '.join(FORMS)}")
    functions = [tool.get("function", tool) for tool in tools]
    chosen = [function for function in functions if name in (None, function.get("name"))]
    if not chosen or not all(isinstance(function.get("name"), str) for function in chosen):
        names = ", ".join(str(function.get("name")) for function in functions)
        raise UsageError(f"tool: got {name!r}, expected one of the tools' names: {names or 'there are none'}")
    lines = [f"call{i}: {FORMS[form]((f['name'], f'args{i}'), special_tokens)}" for i, f in enumerate(chosen)]
    lines += [f"args{i}: {json_rule(_arguments(function))}" for i, function in enumerate(chosen)]
    return "\n".join([f"start: {' | '.join(f'call{i}' for i in range(len(chosen)))}", *lines]) + "\n"


def _arguments(function: Mapping[str, Any]) -> str:
    return json.dumps({"type": "object", **(function.get("parameters") or {"properties": {}})}, ensure_ascii=False)


def _text(text: str) -> str:
    """A string of Lark."""
    return json.dumps(text, ensure_ascii=False)


def _mark(mark: str, special_tokens: Mapping[str, int]) -> str:
    return f"<[{special_tokens[mark]}]>" if mark in special_tokens else _text(mark)


def _object(function: _Function, key: str) -> str:
    """With the spaces of ``json.dumps``, as in chat templates."""
    name, rule = function
    begin = f'{{"name": {json.dumps(name)}, "{key}": '
    return f"{_text(begin)} {rule} {_text('}')}"


def _hermes(function: _Function, special_tokens: Mapping[str, int]) -> str:
    begin, end = (_mark(mark, special_tokens) for mark in ("<tool_call>", "</tool_call>"))
    newline = _text("\n")
    return f"{begin} {newline} {_object(function, 'arguments')} {newline} {end}"


def _mistral(function: _Function, special_tokens: Mapping[str, int]) -> str:
    """Newer models have a token ``[ARGS]`` between name and arguments."""
    begin = _mark("[TOOL_CALLS]", special_tokens)
    if "[ARGS]" in special_tokens:
        return f"{begin} {_text(function[0])} {_mark('[ARGS]', special_tokens)} {function[1]}"
    return f"{begin} {_text('[')} {_object(function, 'arguments')} {_text(']')}"


# By format: the rule of a call
FORMS: Mapping[str, Callable[[_Function, Mapping[str, int]], str]] = {
    "hermes": _hermes,
    "mistral": _mistral,
    "llama3_json": lambda function, special_tokens: _object(function, "parameters"),
    "json": lambda function, special_tokens: _object(function, "arguments"),
}
