"""Structured output over HTTP: every answer is of its structure, forced calls are calls, and errors name the field."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from specrt.runtime.runtime import Runtime, load
from specrt.serving.service import Config, Limits, Service
from tests.tools.serving.parrot import END
from tests.tools.serving.serving import Served, events, serving, user

PROMPT = "The quick brown fox"
MESSAGES: Any = user(PROMPT)


class Fruit(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Literal["apple", "pear"]
    size: int = Field(ge=0, le=99)
    colors: list[Literal["red", "green"]] = Field(min_length=1, max_length=2)


SCHEMA: dict[str, Any] = {**Fruit.model_json_schema(), "x-guidance": {"whitespace_flexible": False}}
DRAFTS: list[dict[str, Any]] = [{"draft": "none"}, {"draft": "ngram"}, {"draft": "model", "num_speculative_tokens": 3}]


@pytest.fixture(scope="module")
def runtime(tiny_bundle: Path) -> Iterator[Runtime]:
    """The library, for what is expected."""
    with load(tiny_bundle, threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def tiny(tiny_bundle: Path) -> Iterator[Served]:
    config = Config(["tiny"], Limits(max_concurrency=3))
    with serving(lambda: Service(load(tiny_bundle, threads=1), config)) as server:
        yield server


@pytest.fixture(scope="module")
def client(tiny: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_schema_holds_for_every_seed_and_draft_and_ids_are_the_library_s(
    client: openai.OpenAI, runtime: Runtime
) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "fruit", "schema": SCHEMA, "strict": True}}
    texts = set()
    for seed in range(4):
        sampling: dict[str, Any] = {"temperature": 2.0, "seed": seed} if seed else {"temperature": 0}
        expected = runtime.generate(MESSAGES, json_schema=SCHEMA, max_new_tokens=100, **sampling)
        Fruit.model_validate_json(expected.text)
        for draft in DRAFTS:
            options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 100, **sampling}
            body = {**draft, "return_token_ids": True}
            answer = client.chat.completions.create(**options, response_format=form, extra_body=body)
            choice = answer.choices[0]
            assert choice.model_extra is not None and choice.model_extra["token_ids"] == expected.token_ids
            assert (choice.message.content, choice.finish_reason) == (expected.text, "stop")
            stream = client.chat.completions.create(**options, response_format=form, extra_body=body, stream=True)
            chunks = [chunk.choices[0] for chunk in stream]
            assert "".join(chunk.delta.content or "" for chunk in chunks) == expected.text
            assert chunks[-1].finish_reason == "stop"
        texts.add(expected.text)
    assert len(texts) > 2, "the seeds give different texts"


def test_the_official_client_parses_the_answer_to_a_class(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 300}
    parsed = client.chat.completions.parse(**options, response_format=Fruit).choices[0].message.parsed
    assert isinstance(parsed, Fruit)
    with client.chat.completions.stream(**options, response_format=Fruit) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def fields_of_structure() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(fields of a request, options of the library)"""
    schema = {"json_schema": SCHEMA}
    return [
        ({"json_schema": SCHEMA}, schema),
        ({"structured_outputs": {"json": SCHEMA}}, schema),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, schema),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, schema),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, schema),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"structured_outputs": {"regex": "[a-f]{3}/[0-9]+"}}, {"regex": "[a-f]{3}/[0-9]+"}),
        ({"structured_outputs": {"grammar": 'start: "x"~2 "y"'}}, {"grammar": 'start: "x"~2 "y"'}),
        ({"grammar": 'start: "x"~2 "y"'}, {"grammar": 'start: "x"~2 "y"'}),
        ({"structured_outputs": {"choice": ['"no"\n', "ja", "é"]}}, {"regex": '"no"\n|ja|é'}),
        ({"response_format": {"type": "text"}}, {}),
    ]


def test_every_field_on_both_endpoints_is_the_library_s_option(tiny: Served, runtime: Runtime) -> None:
    common: dict[str, Any] = {"temperature": 1.0, "seed": 5}
    for fields, options in fields_of_structure():
        expected = runtime.generate(MESSAGES, max_new_tokens=40, **common, **options)
        answer = tiny.chat(PROMPT, max_tokens=40, return_token_ids=True, **common, **fields)
        assert answer["choices"][0]["token_ids"] == expected.token_ids, fields
        expected = runtime.generate(PROMPT, max_new_tokens=40, **common, **options)
        body = {**common, **fields, "return_token_ids": True}
        answer = tiny.post("/v1/completions", prompt=PROMPT, max_tokens=40, **body).json()
        assert answer["choices"][0]["token_ids"] == expected.token_ids, fields


def test_each_choice_of_n_follows_the_structure(tiny: Served) -> None:
    choices = tiny.chat(PROMPT, n=3, seed=1, structured_outputs={"regex": "[ab]{6}"})["choices"]
    texts = [choice["message"]["content"] for choice in choices]
    assert all(len(text) == 6 and set(text) <= {"a", "b"} for text in texts) and len(set(texts)) > 1


# --- errors ---------------------------------------------------------------------------------------------------------

S, R = "structured_outputs", "response_format"
SCHEMA_FIELD = "response_format.json_schema.schema"


def of_schema(schema: Any) -> dict[str, Any]:
    return {R: {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def tool(parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({R: "json"}, R, "expected an object"),
    ({R: {}}, f"{R}.type", "'json_schema'"),
    ({R: {"type": "xml"}}, f"{R}.type", "'json_schema'"),
    ({R: {"type": "json_schema"}}, f"{R}.json_schema", "expected an object"),
    ({R: {"type": "json_schema", "json_schema": {"name": "x"}}}, SCHEMA_FIELD, "expected a JSON schema"),
    ({R: {"type": "text", "schema": {}}}, f"{R}.schema", "unknown field"),
    (of_schema({"type": "strin"}), SCHEMA_FIELD, "Invalid type: strin"),
    (of_schema({"type": "array", "uniqueItems": True}), SCHEMA_FIELD, "uniqueItems"),
    (of_schema([]), SCHEMA_FIELD, "got list, expected a JSON schema"),
    (of_schema({"$ref": "http://x/y"}), SCHEMA_FIELD, "$ref"),
    (of_schema({"$ref": "file:///etc/passwd"}), SCHEMA_FIELD, "$ref"),
    ({"grammar": '%import "/etc/passwd"\nstart: x'}, "grammar", ""),
    ({"grammar": "%import .common (x)\nstart: x"}, "grammar", ""),
    (of_schema({"x-guidance": 5}), SCHEMA_FIELD, "x-guidance"),
    (of_schema({"const": "HALF"}), SCHEMA_FIELD, "surrogate"),
    ({S: {"regex": "HALF"}}, f"{S}.regex", "surrogate"),
    ({S: {"choice": ["HALF"]}}, f"{S}.choice", "surrogate"),
    ({"grammar": 'start: "HALF"'}, "grammar", "surrogate"),
    ({"tools": [tool({"const": "HALF"})], "tool_choice": "required"}, "messages", "surrogate"),
    ({"json_schema": {"not": {}}}, "json_schema", "not"),
    ({S: {}}, S, "got 0 of json, regex, grammar"),
    ({S: {"regex": "a", "json": {}}}, S, "got 2 of json, regex, grammar"),
    ({S: {"structural_tag": "x"}}, f"{S}.structural_tag", "unknown field"),
    ({S: {"regex": "("}}, f"{S}.regex", "invalid regex"),
    ({S: {"json": "{"}}, f"{S}.json", "not JSON"),
    ({S: {"choice": ["a", ""]}}, f"{S}.choice", "none of them empty"),
    ({S: {"choice": ["a"] * 1025}}, f"{S}.choice", "at most 1024"),
    ({S: {"grammar": 'root ::= "a"'}}, f"{S}.grammar", "got GBNF"),
    ({"grammar": 'root ::= "a"'}, "grammar", "got GBNF"),
    ({"grammar": "start: x y"}, "grammar", "unknown name"),
    ({"json_schema": {}, S: {"regex": "a"}}, "json_schema", f"got it with {S}.regex"),
    ({R: {"type": "json_object"}, "grammar": "start: x"}, "grammar", f"got it with {R}.type"),
    ({S: {"regex": "a"}, "tools": [tool()]}, f"{S}.regex", "got it with tools"),
    ({"tools": [tool({"type": "strin"})], "tool_choice": "required"}, "tools[0].function.parameters", "strin"),
    ({"tools": [tool(), tool({"type": "x"}, strict=True)]}, "tools[1].function.parameters", "x"),
    ({**of_schema({"type": "x"}), "tools": [tool()]}, SCHEMA_FIELD, "Invalid type: x"),
    ({"tools": [tool()], "tool_choice": "any"}, "tool_choice", "'required'"),
    ({"tools": [tool()], "tool_choice": {"type": "x"}}, "tool_choice.type", "'function'"),
    (
        {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
        "expected one of f",
    ),
]


@pytest.mark.parametrize(("fields", "param", "reason"), WRONG, ids=[str(fields)[:120] for fields, _, _ in WRONG])
def test_what_is_wrong_is_named_before_anything_is_generated(
    served: Served, fields: dict[str, Any], param: str, reason: str
) -> None:
    body = json.dumps({"messages": MESSAGES, "stream": True, **fields}).replace("HALF", "\\ud800")
    response = served.client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert error["message"].startswith(f"{param}: ") and reason in error["message"], error
    assert "\n" not in error["message"]


def test_what_takes_long_to_compile_is_refused(tiny: Served) -> None:
    texts = [str(number) for number in range(30_000)]
    for fields in ({"json_schema": {"enum": texts}}, {"grammar": f"start: {' | '.join(texts)}"}):
        error = tiny.post("/v1/chat/completions", messages=MESSAGES, **fields).json()["error"]
        assert error["param"] == next(iter(fields)) and "at most 131072" in error["message"]


def test_levels_of_nesting_are_an_error_of_the_request_wherever_they_end(served: Served) -> None:
    for depth in (200, 300, *range(880, 1000, 6)):
        schema = '{"items": ' * depth + "{}" + "}" * depth
        body = json.dumps({"messages": MESSAGES, "json_schema": "SCHEMA"}).replace('"SCHEMA"', schema)
        headers = {"content-type": "application/json"}
        response = served.client.post("/v1/chat/completions", content=body, headers=headers)
        assert response.status_code == 400, (depth, response.text)


def test_without_llguidance_the_error_gives_the_command(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    never_compiled = {"structured_outputs": {"regex": "never compiled"}}
    for fields, param in ((never_compiled, f"{S}.regex"), ({"tools": [tool({"title": "n"}, strict=True)]}, "tools")):
        response = served.post("/v1/chat/completions", messages=MESSAGES, **fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, param, "unsupported_parameter")
        assert "pip install 'specrt[grammar]'" in error["message"]


def test_a_text_that_no_token_continues_is_an_error_of_the_request(served: Served) -> None:
    fields: dict[str, Any] = {"min_tokens": 5, S: {"grammar": f'start: "a" <[{END}]> "b"'}}
    for stream in (False, True):
        response = served.post("/v1/chat/completions", messages=MESSAGES, stream=stream, **fields)
        error = events(response)[-1]["error"] if stream and response.status_code == 200 else response.json()["error"]
        assert error["param"] == f"{S}.grammar" and "no id is left" in error["message"]
    assert served.chat("fine")["choices"][0]["message"]["content"] == "fine"
