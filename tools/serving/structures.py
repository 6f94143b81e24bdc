"""Structured output of a request as options of the runtime: at most one grammar, for structure and tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from specrt.engines.errors import SpecrtError, UsageError
from specrt.runtime.runtime import Runtime
from specrt.runtime.structured import json_rule, schema_text
from specrt.runtime.text.tool_calls import strict_tool_grammar, tool_call_grammar
from specrt.serving.protocol.errors import CHAT_PARAMS, ApiError, refused
from specrt.serving.protocol.requests import Wanted

MAX_CHARS = 1 << 17  # of a schema or grammar, since compiling takes a time that others wait for
_ANY_OBJECT = '{"type": "object"}'


def grammar_options(wanted: Wanted, form: str | None, special_tokens: Mapping[str, int]) -> dict[str, Any]:
    """The option that constrains the text, or none. ``form`` is the format of tool calls.

    A forced response is calls. With JSON and tools, the text is either. Raises ``UsageError``.
    """
    options = _grammar_options(wanted, form, special_tokens)
    for name, value in options.items():
        if isinstance(value, str) and len(value) > MAX_CHARS:
            raise UsageError(f"{name}: got {len(value)} characters, expected at most {MAX_CHARS}")
    return options


def _grammar_options(wanted: Wanted, form: str | None, special_tokens: Mapping[str, int]) -> dict[str, Any]:
    structure, use = wanted.structure, wanted.tools
    is_schema = structure is not None and structure.option == "json_schema"
    schema = schema_text("json_schema", structure.value) if structure and is_schema else _ANY_OBJECT
    if use is None or form is None:
        return {structure.option: schema if is_schema else structure.value} if structure else {}
    tools = use.callable
    if use.is_forced:
        return {"grammar": tool_call_grammar(form, tools, special_tokens, several=use.parallel)}
    if structure is not None:
        return {"grammar": tool_call_grammar(form, tools, special_tokens, otherwise=[json_rule(schema)])}
    if use.is_strict:
        return {"grammar": strict_tool_grammar(form, tools, special_tokens)}
    if use.is_restricted:  # calls of other tools are forbidden; the arguments are free
        free = [{"name": name, "parameters": json.loads(_ANY_OBJECT)} for name in sorted(use.names)]
        return {"grammar": strict_tool_grammar(form, free, special_tokens)}
    return {}


def refused_request(error: SpecrtError, wanted: Wanted, runtime: Runtime) -> ApiError:
    """The 400 that names the field that the runtime refused, also in a grammar of several parts."""
    names = dict(CHAT_PARAMS) if wanted.is_chat else {}
    if wanted.structure is not None:
        names[wanted.structure.option] = names["structured output"] = wanted.structure.param
    if wanted.tools is not None:
        names["grammar"] = "tools"
        names.setdefault("structured output", "tools")
    if not isinstance(error, UsageError):  # llguidance is not installed
        return refused(error, names, "unsupported_parameter")
    if wanted.tools is not None and str(error).startswith("grammar: "):
        for param, options in _parts(wanted):
            try:
                runtime.stream([0], **options)
            except UsageError as of_part:
                return refused(of_part, {next(iter(options)): param})
    return refused(error, names)


def _parts(wanted: Wanted) -> Iterator[tuple[str, dict[str, Any]]]:
    assert wanted.tools is not None
    for index, schema in enumerate(wanted.tools.schemas):
        yield f"tools[{index}].function.parameters", {"grammar": tool_call_grammar("json", [schema], {})}
    if wanted.structure is not None:
        yield wanted.structure.param, {wanted.structure.option: wanted.structure.value}
