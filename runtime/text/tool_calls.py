"""Grammars that force a tool call, in the formats of several model families."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from specrt.engines.errors import UsageError
from specrt.runtime.structured import json_rule

_Function = tuple[str, str]  # its name, and the Lark rule of its arguments
_BEGIN_OF_JSON = r"\s*(```(json)?|<\|python_tag\|>)?\s*[\[{]"


def tool_call_grammar(
    form: str,
    tools: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, int],
    name: str | None = None,
    otherwise: Sequence[str] = (),
    several: bool = False,
) -> str:
    """A Lark grammar (option ``grammar``) of one call, of tool ``name`` or of any of ``tools``; or of ``several``.

    ``form`` is one of ``FORMS``. ``tools`` are functions' schemas as for chat templates, ``special_tokens`` those of
    the tokenizer (``TextCodec.special_tokens``). Markers that are special tokens are generated as such; with option
    ``visible_special_tokens`` they are part of the text. ``otherwise`` are items of a Lark rule, each of them allowed
    as the whole text instead of a call. Raises ``UsageError`` for another form, for a tool without a name, and for a
    ``name`` that no tool has.
    """
    bodies, rules = _calls(form, tools, special_tokens, name)
    mark = _mark(FORMS[form].mark, special_tokens) if FORMS[form].mark else ""
    calls = FORMS[form].calls(mark, several, special_tokens)
    return "\n".join([f"start: {' | '.join([calls, *otherwise])}", f"call: {bodies}", *rules]) + "\n"


def strict_tool_grammar(form: str, tools: Sequence[Mapping[str, Any]], special_tokens: Mapping[str, int]) -> str:
    """A Lark grammar of any text in which the arguments of calls follow the schemas of ``tools``.

    In formats without a marker, text that begins with a JSON object or array is a call. Parameters and errors are those
    of ``tool_call_grammar``.
    """
    bodies, rules = _calls(form, tools, special_tokens)
    mark = FORMS[form].mark
    if not mark:
        text = f"TEXT: /(?s:.*)/ & ~/{_BEGIN_OF_JSON}(?s:.*)/"
        return "\n".join([f"start: {bodies} | TEXT", text, *rules]) + "\n"
    head = "head" if mark in special_tokens else "head[lazy]"  # lazy: up to the first marker
    calls = FORMS[form].calls("", False, special_tokens)
    lines = [f"start: (head {calls})* tail", "tail: TEXT", f"{head}: TEXT {_mark(mark, special_tokens)}"]
    return "\n".join([*lines, f"call: {bodies}", "TEXT: /(?s:.*)/", *rules]) + "\n"


def _calls(
    form: str, tools: Sequence[Mapping[str, Any]], special_tokens: Mapping[str, int], name: str | None = None
) -> tuple[str, list[str]]:
    """(the calls without the marker, the rules of their arguments)."""
    if form not in FORMS:
        raise UsageError(f"tool call format: got {form!r}, expected one of {', '.join(FORMS)}")
    functions = [tool.get("function", tool) for tool in tools]
    chosen = [function for function in functions if name in (None, function.get("name"))]
    if not chosen or not all(isinstance(function.get("name"), str) for function in chosen):
        names = ", ".join(str(function.get("name")) for function in functions)
        raise UsageError(f"tool: got {name!r}, expected one of the tools' names: {names or 'there are none'}")
    bodies = [FORMS[form].body((f["name"], f"args{i}"), special_tokens) for i, f in enumerate(chosen)]
    return " | ".join(bodies), [f"args{i}: {json_rule(_arguments(f))}" for i, f in enumerate(chosen)]


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
    newline = _text("\n")
    return f"{newline} {_object(function, 'arguments')} {newline} {_mark('</tool_call>', special_tokens)}"


def _mistral(function: _Function, special_tokens: Mapping[str, int]) -> str:
    """Newer models have a token ``[ARGS]`` between name and arguments, older ones write a list of objects."""
    if "[ARGS]" in special_tokens:
        return f"{_text(function[0])} {_mark('[ARGS]', special_tokens)} {function[1]}"
    return _object(function, "arguments")


def _hermes_calls(mark: str, several: bool, special_tokens: Mapping[str, int]) -> str:
    return f"{mark} call" + (f" ({_text(chr(10))}? {mark} call)*" if several else "")


def _mistral_calls(mark: str, several: bool, special_tokens: Mapping[str, int]) -> str:
    if "[ARGS]" in special_tokens:
        return f"({mark} call)+" if several else f"{mark} call"
    return f"{mark} {_list(several)}"


def _list(several: bool) -> str:
    return '"[" call (", " call)* "]"' if several else '"[" call "]"'


class _Form(NamedTuple):
    """``mark`` begins a call. ``body`` gives the rule of a call after it, ``calls`` that of one call or of several."""

    mark: str
    body: Callable[[_Function, Mapping[str, int]], str]
    calls: Callable[[str, bool, Mapping[str, int]], str]


# By format
FORMS: Mapping[str, _Form] = {
    "hermes": _Form("<tool_call>", _hermes, _hermes_calls),
    "mistral": _Form("[TOOL_CALLS]", _mistral, _mistral_calls),
    "llama3_json": _Form(
        "",
        lambda function, special_tokens: _object(function, "parameters"),
        lambda mark, several, special_tokens: 'call ("; " call)*' if several else "call",
    ),
    "json": _Form(
        "",
        lambda function, special_tokens: _object(function, "arguments"),
        lambda mark, several, special_tokens: f"call | {_list(several)}" if several else "call",
    ),
}
