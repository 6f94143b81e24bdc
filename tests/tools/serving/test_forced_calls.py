"""Tool calls by grammar over HTTP: forced ones, strict ones, and tools together with a response format."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from specrt.runtime.text.messages import ChatOptions
from specrt.runtime.text.tool_calls import tool_call_grammar
from tests.tools.serving.serving import Served, user
from tests.tools.serving.test_structures import DRAFTS, SCHEMA, Fruit, S, of_schema

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": WEATHER}} for name in ("get_weather", "get-time")
]
STRICT: list[dict[str, Any]] = [
    {"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS
]


def check_arguments(arguments: str) -> None:
    given = json.loads(arguments)
    assert set(given) == {"city", "days"} and given["city"] in ("Rome", "Oslo") and given["days"] in range(1, 10)


@pytest.mark.parametrize("name", [None, "get_weather", "get-time"])
def test_a_forced_call_is_one_call_whatever_the_model_would_say(served: Served, name: str | None) -> None:
    choice: Any = {"type": "function", "function": {"name": name}} if name else "required"
    seen = set()
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        for seed, draft in enumerate((*DRAFTS, *DRAFTS)):
            options: dict[str, Any] = {"model": "parrot", "messages": user("No call!"), "seed": seed, "tools": TOOLS}
            options |= {
                "tool_choice": choice,
                "parallel_tool_calls": bool(name),
                "extra_body": {**draft, "return_token_ids": True},
            }
            answer = client.chat.completions.create(**options).choices[0]
            (call,) = answer.message.tool_calls or []
            assert call.type == "function" and call.id and name in (None, call.function.name)
            assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
            check_arguments(call.function.arguments)
            chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**options, stream=True)]
            first, *others = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
            assert first.function is not None and first.id and chunks[-1].finish_reason == "tool_calls"
            assert first.function.name == call.function.name and {part.index for part in others} == {0}
            assert "".join(part.function.arguments or "" for part in others if part.function) == call.function.arguments
            codec = served.service.runtime.codec
            prompt = codec.encode(user("No call!"), ChatOptions(tools=TOOLS))
            grammar = tool_call_grammar("hermes", TOOLS, codec.special_tokens, name)
            expected = served.service.runtime.generate(prompt, grammar=grammar, temperature=1.0, seed=seed)
            assert answer.model_extra is not None and answer.model_extra["token_ids"] == expected.token_ids
            seen.add((call.function.name, call.function.arguments))
    assert len(seen) > 1


def test_a_forced_call_that_is_cut_says_so(served: Served) -> None:
    choice = served.chat("x", tools=TOOLS, tool_choice="required", max_tokens=20)["choices"][0]
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]


def test_required_gives_one_or_more_calls_and_one_without_parallel_calls(served: Served) -> None:
    text = "\n".join(call_text('{"city":"Rome","days":3}') for _ in range(2))
    for said, num in ((text, 2), (call_text('{"city":"Oslo","days":1}'), 1)):
        choice = served.chat(said, tools=TOOLS, tool_choice="required")["choices"][0]
        assert len(choice["message"]["tool_calls"]) == num and choice["finish_reason"] == "tool_calls"
    for choice in ({"tool_choice": "required", "parallel_tool_calls": False}, named("get_weather")):
        assert len(served.chat(text, tools=TOOLS, **choice)["choices"][0]["message"]["tool_calls"]) == 1


def named(name: str) -> dict[str, Any]:
    return {"tool_choice": {"type": "function", "function": {"name": name}}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}}


def test_only_allowed_tools_are_called_and_the_template_shows_all(served: Served) -> None:
    right = call_text('{"city":"Rome","days":3}')
    for seed in range(3):
        for mode in ("auto", "required"):
            for text in (right, "No call."):
                answer = served.chat(text, tools=TOOLS, seed=seed, **allowed(mode, "get-time"))
                choice, message = answer["choices"][0], answer["choices"][0]["message"]
                names = {call["function"]["name"] for call in message.get("tool_calls", [])}
                is_call = mode == "required" or text == right
                assert names == ({"get-time"} if is_call else set())
                assert is_call or (message["content"], choice["finish_reason"]) == (text, "stop")
    shown = [
        served.chat("x", tools=TOOLS, **extra)["usage"]["prompt_tokens"] for extra in ({}, allowed("auto", "get-time"))
    ]
    assert shown[0] == shown[1]
    free = call_text('{"anything": [1]}')
    message = served.chat(free, tools=TOOLS, **allowed("auto", "get_weather"))["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == '{"anything": [1]}', "without strict there is no schema"


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (allowed("auto", "nope"), "tool_choice.allowed_tools.tools[0].function.name"),
        (allowed("auto"), "tool_choice.allowed_tools.tools"),
        (allowed("sometimes", "get-time"), "tool_choice.allowed_tools.mode"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice.type"),
        (named("nope"), "tool_choice.function.name"),
    ],
)
def test_a_wrong_choice_names_its_field(served: Served, choice: dict[str, Any], param: str) -> None:
    response = served.post("/v1/chat/completions", messages=user("x"), tools=TOOLS, **choice)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def call_text(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'


def test_arguments_of_strict_tools_follow_the_schema_and_other_text_is_free(served: Served) -> None:
    right, wrong = '{"city":"Rome","days":3}', '{"city":"Ulm","days":30}'
    for text in ("No call, but <tool_ and {} and é.", f"So: {call_text(right)}", call_text(right) * 2):
        free = served.chat(text, tools=TOOLS, return_token_ids=True)["choices"][0]
        strict = served.chat(text, tools=STRICT, return_token_ids=True)["choices"][0]
        assert strict["token_ids"] == free["token_ids"] and strict["finish_reason"] == free["finish_reason"]
    for tools in (TOOLS, STRICT):
        for seed in range(3):
            choice = served.chat(f"So: {call_text(wrong)}{call_text(wrong)}", tools=tools, seed=seed)["choices"][0]
            assert choice["message"]["content"] == "So:"
            arguments = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
            if tools is STRICT:
                assert arguments
                for text in arguments:
                    check_arguments(text)
            else:
                assert json.loads(arguments[0]) == json.loads(wrong), "it is the schema that changes the call"


def test_json_and_tools_are_one_or_the_other(served: Served) -> None:
    right, whole = call_text('{"city":"Rome","days":3}'), '{"name":"pear","size":7,"colors":["red"]}'
    called = served.chat(right, tools=TOOLS, **of_schema(SCHEMA))["choices"][0]
    assert called["finish_reason"] == "tool_calls"
    answered = served.chat(whole, tools=TOOLS, **of_schema(SCHEMA))["choices"][0]
    assert (answered["message"]["content"], answered["finish_reason"]) == (whole, "stop")
    for seed in range(3):
        message = served.chat("neither", tools=TOOLS, seed=seed, **of_schema(SCHEMA))["choices"][0]["message"]
        if message["content"] is None:
            check_arguments(message["tool_calls"][0]["function"]["arguments"])
        else:
            Fruit.model_validate_json(message["content"])
    any_object = served.chat('{"a": 1}', tools=TOOLS, response_format={"type": "json_object"})["choices"][0]
    assert any_object["message"]["content"] == '{"a": 1}'


def test_a_tool_that_may_not_be_called_leaves_the_structure(served: Served) -> None:
    fields: dict[str, Any] = {"tools": STRICT, "tool_choice": "none", S: {"regex": "[xy]{4}"}}
    choice = served.chat("xyxy", **fields)["choices"][0]
    assert choice["message"]["content"] == "xyxy"


def test_langchain_gets_objects_of_a_class(served: Served) -> None:
    whole = '{"name":"pear","size":7,"colors":["red","green"]}'
    chat = ChatOpenAI(model="parrot", base_url=f"{served.url}/v1", api_key=SecretStr("none"), max_retries=0)
    fruit = Fruit(name="pear", size=7, colors=["red", "green"])
    assert chat.with_structured_output(Fruit, method="json_schema").invoke(whole) == fruit
    for strict in (None, True):
        caller = chat.with_structured_output(Fruit, method="function_calling", strict=strict)
        text = f'<tool_call>\n{{"name": "Fruit", "arguments": {whole}}}\n</tool_call>'
        assert caller.invoke(text) == fruit
        assert isinstance(caller.invoke("No call!"), Fruit)
    as_json = chat.with_structured_output(method="json_mode")
    assert as_json.invoke(whole) == json.loads(whole)
