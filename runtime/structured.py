"""The options for structured output, each converted to a Lark grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from reprlib import repr as short_repr
from typing import Any, NamedTuple

from specrt.engines.errors import UsageError

# Without a limit a model may write endless white space. x-guidance in a schema takes precedence.
_WHITESPACE = {"whitespace_pattern": r"[ \t\r\n]{1,64}"}
# All tokens that continue a text are allowed, not only the canonical ones.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)  # linear: a space before the name does not span lines


class Grammar(NamedTuple):
    """The ``option`` that was given, and its ``lark`` text for llguidance."""

    option: str
    lark: str


def schema_text(name: str, value: Any) -> str:
    """A JSON schema, a dict or JSON text, as JSON text. Raises ``UsageError``."""
    schema = value
    if isinstance(value, str | bytes):
        try:
            schema = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{name}: not JSON ({error}); expected a JSON schema") from error
    if not isinstance(schema, Mapping | bool):
        raise UsageError(f"{name}: got {type(schema).__name__}, expected a JSON schema: an object, or its JSON text")
    try:
        return _unicode(name, json.dumps(schema, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{name}: not JSON ({error}); expected a JSON schema of plain values") from error


def _unicode(name: str, text: str) -> str:
    if not text.isascii() and re.search(r"[\ud800-\udfff]", text):
        raise UsageError(f"{name}: got half a surrogate pair, expected Unicode text; read it as UTF-8")
    return text


def pattern_text(name: str, value: Any) -> str:
    """A non-empty string. Raises ``UsageError``."""
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{name}: got {short_repr(value)}, expected a non-empty string")
    return _unicode(name, value)


def lark_text(name: str, value: Any) -> str:
    """A Lark grammar. Raises ``UsageError``, with a separate message for GBNF."""
    text = pattern_text(name, value)
    if _GBNF_RULE.search(text):
        raise UsageError(f"{name}: got GBNF, the grammars of llama.cpp; expected Lark: write rules as 'start: ...'")
    return text


def json_rule(schema: str) -> str:
    """A JSON schema as an item of a Lark rule. ``schema`` is JSON text. Raises ``UsageError`` for too many levels."""
    try:
        return _json_rule(json.loads(schema))
    except RecursionError as error:
        raise UsageError("json_schema: got too many levels of nesting; use fewer, or $ref") from error


def _json_rule(parsed: Any) -> str:
    if isinstance(parsed, bool):
        parsed = {} if parsed else {"enum": []}
    given = parsed.get("x-guidance", {})
    if not isinstance(given, dict):
        raise UsageError(f"json_schema: x-guidance: got {short_repr(given)}, expected an object")
    guidance = {**_WHITESPACE, **given}
    if guidance.get("whitespace_flexible") is False:
        del guidance["whitespace_pattern"]
    return "%json " + json.dumps({**parsed, "x-guidance": guidance}, ensure_ascii=False)


def grammar_of(
    json_schema: str | None = None, regex: str | None = None, grammar: str | None = None, json_object: bool = False
) -> Grammar | None:
    """The grammar of the one option that is given; None without any. Raises ``UsageError`` for several."""
    bodies = {
        "json_schema": None if json_schema is None else f"start: {json_rule(json_schema)}",
        "regex": None if regex is None else f"start: /{_slashes_escaped(regex)}/",
        "grammar": grammar,
        "json_object": "start: " + json_rule('{"type": "object"}') if json_object else None,
    }
    given = {name: body for name, body in bodies.items() if body is not None}
    if len(given) > 1:
        raise UsageError(f"{', '.join(given)}: got {len(given)} of {', '.join(bodies)}, expected at most one")
    return next((Grammar(name, body + _OPTIONS) for name, body in given.items()), None)


def _slashes_escaped(regex: str) -> str:
    """A regex as Lark expects it between slashes: slashes are escaped, and there is no newline."""
    changed = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return re.sub(r"\\.|/|\n", lambda found: changed.get(found[0], found[0]), regex, flags=re.DOTALL)
