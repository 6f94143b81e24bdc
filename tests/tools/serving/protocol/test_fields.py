"""Fields of requests: what is accepted has its effect, and everything else is an error that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.tools.serving.parrot import CONTEXT
from tests.tools.serving.serving import Served, user


def test_sampling_fields_reach_the_runtime(served: Served) -> None:
    given: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.01,
        "seed": 3,
        "presence_penalty": 0.5,
    }
    given |= {"frequency_penalty": 0.25, "repetition_penalty": 1.1, "num_speculative_tokens": 2, "draft": "model"}
    body: dict[str, Any] = {**given, "rule": "block", "logit_bias": {"40": 5, "41": -1.5}, "min_tokens": 2}
    answer = served.post("/v1/completions", prompt="ab", max_tokens=12, **body, return_token_ids=True).json()
    options: dict[str, Any] = {**given, "rule": "block", "logit_bias": {40: 5, 41: -1.5}, "min_new_tokens": 2}
    expected = served.service.runtime.generate("ab", max_new_tokens=12, **options)
    assert answer["choices"][0]["token_ids"] == expected.token_ids
    plain = served.service.runtime.generate("ab", max_new_tokens=12)
    assert plain.token_ids != expected.token_ids  # they have an effect here


def test_fields_without_effect_are_accepted(served: Served) -> None:
    fields = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "s"}
    answer = served.chat("same", **fields, prompt_cache_key="k", stop=None, tools=None, n=1)
    assert answer["choices"][0]["message"]["content"] == "same"


def test_values_of_other_servers_for_none(served: Served) -> None:
    """-1 is no seed, no limit and no filter in vLLM and llama.cpp."""
    answer = served.chat("the whole of it", seed=-1, max_tokens=-1, top_k=-1, repetition_penalty=1)
    assert answer["choices"][0]["message"]["content"] == "the whole of it"
    texts = {served.post("/v1/completions", prompt="a", seed=-1, max_tokens=30).text for _ in range(2)}
    assert len(texts) == 2
    text = served.post("/v1/completions", prompt="a", max_tokens=-1, ignore_eos=True, temperature=0).json()
    assert text["usage"]["total_tokens"] == CONTEXT


def test_a_name_that_is_there_twice_is_an_error(served: Served) -> None:
    """Else one of the two would be ignored."""
    inner = '{"role": "user", "content": "x", "content": "y"}'
    for body, param in (('{"prompt": "x", "seed": 1, "seed": 1}', "seed"), (f'{{"messages": [{inner}]}}', "content")):
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
            response = served.client.post(path, content=body, headers={"content-type": "application/json"})
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def deep(levels: int) -> Any:
    """Objects in each other, which some of Python's functions do not take."""
    value: Any = 1
    for _ in range(levels):
        value = {"x": value}
    return value


M = {"messages": user("x")}
PART = {"type": "image_url", "image_url": {"url": "x"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
NAMED = {"function": {"name": "f"}}
SCHEMA = "response_format.json_schema"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
        ({"messages": [{"role": "user", "content": [PART]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        ({**M, "tempersture": 1}, "tempersture"),
        ({**M, "temperature": "hot"}, "temperature"),
        ({**M, "temperature": -1}, "temperature"),
        ({**M, "top_p": 1.5}, "top_p"),
        ({**M, "top_k": 2.5}, "top_k"),
        ({**M, "min_p": True}, "min_p"),
        ({**M, "seed": "x"}, "seed"),
        ({**M, "presence_penalty": 3}, "presence_penalty"),
        ({**M, "max_tokens": 0}, "max_tokens"),
        ({**M, "max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({**M, "max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({**M, "n": 0}, "n"),
        ({**M, "n": 129}, "n"),
        ({**M, "stop": [""]}, "stop"),
        ({**M, "stop": ["x"] * 17}, "stop"),
        ({**M, "stop": "x" * 1025}, "stop"),
        ({**M, "stop_token_ids": ["x"]}, "stop_token_ids"),
        ({**M, "logit_bias": {"x": 1}}, "logit_bias"),
        ({**M, "logit_bias": {"99999": 1}}, "logit_bias"),
        ({**M, "logit_bias": {"1": 101}}, "logit_bias"),
        ({**M, "top_logprobs": 2}, "top_logprobs"),
        ({**M, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({**M, "logprobs": 3}, "logprobs"),
        ({**M, "stream": "yes"}, "stream"),
        ({**M, "stream_options": {}}, "stream_options"),
        ({**M, "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({**M, "num_speculative_tokens": 99}, "num_speculative_tokens"),
        ({**M, "draft": "other"}, "draft"),
        ({**M, "rule": "other"}, "rule"),
        ({**M, "store": True}, "store"),
        ({**M, "service_tier": "flex"}, "service_tier"),
        ({**M, "chat_template_kwargs": []}, "chat_template_kwargs"),
        ({**M, "guided_regex": "a"}, "guided_regex"),
        ({**M, "functions": []}, "functions"),
        ({**M, "tool_choice": "auto"}, "tool_choice"),
        ({**M, "tools": [{"type": "x"}]}, "tools[0].type"),
        ({**M, "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({**M, "tool_choice": "required"}, "tool_choice"),
        ({**M, "model": 5}, "model"),
        # in objects of the request, and values that Python takes for others
        ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "index": "0"}]}]}, "messages[0].tool_calls[0].index"),
        ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "x": 1}]}]}, "messages[0].tool_calls[0].x"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]}, "messages[0].content[0].y"),
        ({**M, "tools": [{**TOOL, "x": 1}]}, "tools[0].x"),
        ({**M, "tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x"),
        ({**M, "tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
        ({**M, "tools": [TOOL], "tool_choice": {"type": "function", "x": 1, **NAMED}}, "tool_choice.x"),
        ({**M, "response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
        ({**M, "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}}, f"{SCHEMA}.x"),
        ({**M, "stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({**M, "stream": True, "stream_options": {"include_obfuscation": 0}}, "stream_options.include_obfuscation"),
        ({**M, "store": 0}, "store"),
        ({**M, "stop_token_ids": [[1]]}, "stop_token_ids"),
        ({**M, "stop_token_ids": {}}, "stop_token_ids"),
        ({**M, "logit_bias": {"1": True}}, "logit_bias"),
        ({**M, "seed": 10**300}, "seed"),
        ({**M, "max_tokens": -2}, "max_tokens"),
        ({**M, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({**M, "chat_template_kwargs": {"tools": 5}}, "chat_template_kwargs.tools"),
        ({**M, "chat_template_kwargs": {"chat_template_name": "x"}}, "chat_template_kwargs.chat_template_name"),
        ({**M, "chat_template_kwargs": {"x": deep(700)}}, "chat_template_kwargs.x"),
        ({**M, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": deep(700)}}}]}, "tools"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(served: Served, body: Any, param: str) -> None:
    response = served.post("/v1/chat/completions", **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), error
    assert error["message"].startswith(param) and "\n" not in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": ["x"] * 65, "n": 2}, "n"),
        ({"prompt": "x", "messages": []}, "messages"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(served: Served, body: Any, param: str) -> None:
    response = served.post("/v1/completions", **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_bodies_that_are_none(served: Served) -> None:
    def status(content: str | bytes, kind: str = "application/json") -> int:
        url, headers = "/v1/chat/completions", {"content-type": kind}
        response = served.client.post(url, content=content, headers=headers)
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        return response.status_code

    whole = json.dumps(M)
    for body in ("", "[]", "{", "nul", '{"a": NaN}', "[" * 60_000, b"\xff\xfe\x00", whole[:-1], '"\\ud800"'):
        assert status(body) == 400, body
    half_pair = '{"messages": [{"role": "user", "content": "\\ud800"}]}'
    assert status(half_pair) == 400
    assert status(whole, "text/plain") == 415
    assert status(json.dumps({"messages": user("x" * 70_000)})) == 413
    assert (
        served.chat("x" * 900)["choices"][0]["finish_reason"] == "length"
    )  # it fits the body, and nearly fills the context
    too_long = served.post("/v1/chat/completions", messages=user("x" * 1100)).json()["error"]
    assert (too_long["code"], too_long["param"]) == ("context_length_exceeded", "messages")
