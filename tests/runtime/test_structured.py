"""The options of structured output: what they take, and what they refuse."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from specrt.engines.errors import UsageError
from specrt.runtime.options import options_of
from specrt.runtime.structured import grammar_of, lark_text


def test_a_schema_is_a_dict_or_json_text() -> None:
    schema = {"type": "object", "properties": {"é": {"type": "null"}}}
    given = options_of({"json_schema": schema}).structure
    assert given == options_of({"json_schema": json.dumps(schema)}).structure
    assert given is not None and given.option == "json_schema"
    assert json.loads(given.lark.splitlines()[0].removeprefix("start: %json "))["properties"] == schema["properties"]


def test_white_space_is_bounded_unless_the_schema_sets_it() -> None:
    def guidance(schema: dict[str, Any]) -> Any:
        grammar = grammar_of(json_schema=json.dumps(schema))
        assert grammar is not None
        return json.loads(grammar.lark.splitlines()[0].removeprefix("start: %json "))["x-guidance"]

    bounded = {"whitespace_pattern": "[ \\t\\r\\n]{1,64}"}
    assert guidance({}) == bounded
    assert guidance({"x-guidance": {"lenient": True}}) == {**bounded, "lenient": True}
    assert guidance({"x-guidance": {"whitespace_flexible": False}}) == {"whitespace_flexible": False}
    assert guidance({"x-guidance": {"whitespace_pattern": " "}}) == {"whitespace_pattern": " "}


def test_slashes_and_newlines_of_a_regex_are_escaped_for_lark() -> None:
    for given, written in (
        ("a/b", r"a\/b"),
        (r"a\/b", r"a\/b"),
        ("a\nb", r"a\nb"),
        ("a\\\nb", r"a\nb"),
        (r"\\/", r"\\\/"),
    ):
        grammar = grammar_of(regex=given)
        assert grammar is not None and grammar.lark.splitlines()[0] == f"start: /{written}/"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json_schema": "{"}, "json_schema: not JSON"),
        ({"json_schema": "[]"}, "json_schema: got list, expected a JSON schema"),
        ({"json_schema": 3}, "json_schema: got int, expected a JSON schema"),
        ({"json_schema": {"a": {1}}}, "json_schema: not JSON"),
        ({"regex": ""}, "regex: got '', expected a non-empty string"),
        ({"regex": 3}, "regex: got 3, expected a non-empty string"),
        ({"grammar": " \n"}, "grammar: got "),
        ({"grammar": 'root ::= "a" | "b"'}, "grammar: got GBNF, the grammars of llama.cpp; expected Lark"),
        ({"json_object": "yes"}, "json_object: got 'yes', expected True or False"),
        ({"regex": "a", "json_object": True}, "regex, json_object: got 2 of json_schema, regex, grammar, json_object"),
        ({"regex": "a", "grammar": "start: x", "json_schema": {}}, "json_schema, regex, grammar: got 3 of"),
    ],
)
def test_other_values_are_refused(options: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        options_of(options)
    assert str(caught.value).startswith(message)


def test_a_long_grammar_is_checked_in_linear_time() -> None:
    """The check for GBNF holds the interpreter, so that a server does nothing else meanwhile."""
    started = time.process_time()
    for text in ("\n" * 100_000 + "x", "x\n" * 50_000, " " * 100_000 + "x", "x" * 100_000, "x" + " \n" * 50_000):
        assert lark_text("grammar", text) == text
    assert time.process_time() - started < 2
    with pytest.raises(UsageError, match="got GBNF"):
        lark_text("grammar", "\n# a comment\n  root\n ::= x")
