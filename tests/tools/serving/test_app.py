"""Endpoints and fields: what is accepted has its effect, and everything else is an error that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.tools.serving.parrot import CONTEXT, END
from tests.tools.serving.serving import Served, events, user


def test_a_chat_answer(served: Served) -> None:
    answer = served.chat("Hello, wörld", model="parrot")
    assert (
        answer["object"] == "chat.completion" and answer["model"] == "parrot" and answer["id"].startswith("chatcmpl-")
    )
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello, wörld", "refusal": None}
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    num = len("Hello, wörld".encode())
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
        num + 3,
        num + 1,
        2 * num + 4,
    )


def test_a_stream_begins_with_the_role_and_has_usage_only_on_request(served: Served) -> None:
    body: dict[str, Any] = {"messages": user("naïve text"), "stream": True}
    plain = events(served.post("/v1/chat/completions", **body))
    assert plain[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert plain[-1]["choices"][0]["finish_reason"] == "stop" and plain[-1]["choices"][0]["delta"] == {}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in plain) == "naïve text"
    assert {chunk["object"] for chunk in plain} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in plain}) == 1 and not any("usage" in chunk for chunk in plain)

    *chunks, last = events(served.post("/v1/chat/completions", **body, stream_options={"include_usage": True}))
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == len("naïve text".encode()) + 1
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)


def test_speculation_delivers_several_tokens_in_one_chunk(served: Served) -> None:
    chunks = events(served.post("/v1/chat/completions", messages=user("a" * 60), stream=True, num_speculative_tokens=4))
    pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert max(map(len, pieces)) == 5
    pieces = [
        chunk["choices"][0]["delta"].get("content", "")
        for chunk in events(
            served.post("/v1/chat/completions", messages=user("a" * 60), stream=True, num_speculative_tokens=0)
        )
    ]
    assert max(map(len, pieces)) == 1


def test_completions_of_text_ids_and_lists(served: Served) -> None:
    texts = {}
    prompts: tuple[Any, ...] = ("ab", [64, 65], ["ab", "cd"], [[64, 65], [66, 67]])
    for prompt in prompts:
        answer = served.post(
            "/v1/completions", prompt=prompt, max_tokens=6, temperature=0, return_token_ids=True
        ).json()
        assert answer["object"] == "text_completion"
        texts[str(prompt)] = [choice["text"] for choice in answer["choices"]]
        assert all(len(choice["token_ids"]) == 6 for choice in answer["choices"])
        assert answer["usage"]["completion_tokens"] == 6 * len(answer["choices"])
    ab, ids, both, both_ids = texts.values()
    expected = served.service.runtime.generate("ab", max_new_tokens=6).text
    assert ab == [expected] and both[0] == expected
    assert ids == both_ids[:1] and both[1] != both[0]
    answer = served.post("/v1/completions", prompt="ab", max_tokens=6, temperature=0, echo=True).json()
    assert answer["choices"][0]["text"] == "ab" + expected
    assert (
        len(served.post("/v1/completions", prompt="ab", return_token_ids=True).json()["choices"][0]["token_ids"]) == 16
    )


def test_choices_of_n(served: Served) -> None:
    def drawn(n: int, seed: int) -> list[str]:
        body = {"prompt": "ab", "max_tokens": 20, "temperature": 1.5, "n": n, "seed": seed, "best_of": n}
        return [choice["text"] for choice in served.post("/v1/completions", **body).json()["choices"]]

    one, three = drawn(1, 5), drawn(3, 5)
    assert three[0] == one[0] and len(set(three)) == 3
    assert three[1:] == [*drawn(1, 6), *drawn(1, 7)]  # choice i has the seed plus i
    chunks = events(
        served.post("/v1/completions", prompt="ab", max_tokens=20, temperature=1.5, n=3, seed=5, stream=True)
    )
    assert [joined(chunks, index) for index in range(3)] == three


def joined(chunks: list[Any], index: int) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    assert [choice["finish_reason"] for choice in choices].count(None) == len(choices) - 1
    return "".join(choice["text"] for choice in choices)


def test_logprobs_in_both_forms_and_in_streams(served: Served) -> None:
    body: dict[str, Any] = {"messages": user("hé"), "temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = served.post("/v1/chat/completions", **body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in whole[:-1]] == [[byte] for byte in "hé".encode()]
    assert whole[0]["token"] == "h" and whole[-1]["token"] == "<|end|>"
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] > -0.1 for entry in whole)
    chunks = events(served.post("/v1/chat/completions", **body, stream=True))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for part in parts if part for entry in part["content"]] == whole

    body = {"prompt": "ab", "temperature": 0, "logprobs": 1, "max_tokens": 6}
    whole = served.post("/v1/completions", **body).json()["choices"][0]
    logprobs = whole["logprobs"]
    assert "".join(logprobs["tokens"]) == whole["text"] and logprobs["text_offset"] == [0, 1, 2, 3, 4, 5]
    assert logprobs["top_logprobs"] == [
        {t: p} for t, p in zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    ]
    chunks = events(served.post("/v1/completions", **body, stream=True))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert [offset for part in parts for offset in part["text_offset"]] == logprobs["text_offset"]


def test_what_ends_a_text(served: Served) -> None:
    for body, text, reason in (
        ({"max_tokens": 3}, "hel", "length"),
        ({"max_completion_tokens": 3}, "hel", "length"),
        ({"stop": "lo"}, "hel", "stop"),
        ({"stop": ["zz", "o t"]}, "hell", "stop"),
        ({"stop_token_ids": [ord("e") - 33]}, "h", "stop"),
        ({"stop": "h", "min_tokens": 4}, "hello t", "stop"),
    ):
        choice = served.chat("hello there", **body)["choices"][0]
        if "stop_token_ids" not in body:
            assert (choice["message"]["content"], choice["finish_reason"]) == (text, reason), body
    ids = served.chat("hi", ignore_eos=True, max_tokens=9, return_token_ids=True)["choices"][0]["token_ids"]
    assert len(ids) == 9 and END in ids[:-1]
    full = served.chat("x" * 500, max_tokens=100_000)["choices"][0]
    assert full["finish_reason"] in ("stop", "length") and len(full["message"]["content"]) == min(500, CONTEXT - 503)


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


M = {"messages": user("x")}
PART = {"type": "image_url", "image_url": {"url": "x"}}


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


def test_models_and_names(served: Served) -> None:
    listed = served.client.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["parrot", "bird"] and listed["object"] == "list"
    assert served.client.get("/v1/models/bird").json()["max_model_len"] == CONTEXT
    for response in (served.client.get("/v1/models/other"), served.post("/v1/completions", model="other", prompt="x")):
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert served.chat("x", model="bird")["model"] == "parrot"
    assert served.client.get("/nowhere").json()["error"]["code"] == "not_found"
    assert served.client.get("/v1/completions").status_code == 405


def test_tokenize_and_detokenize(served: Served) -> None:
    answer = served.post("/tokenize", prompt="hé", return_token_strs=True).json()
    assert answer["count"] == 3 and answer["max_model_len"] == CONTEXT and answer["token_strs"][0] == "h"
    assert served.post("/detokenize", tokens=answer["tokens"]).json()["prompt"] == "hé"
    assert served.post("/tokenize", content="hé").json()["tokens"] == answer["tokens"]
    chat = served.post("/tokenize", messages=user("hé")).json()["tokens"]
    assert chat == served.service.runtime.codec.encode(user("hé")) and chat[1:4] == answer["tokens"]
    for body in ({}, {"prompt": "x", "content": "y"}, {"prompt": "x", "y": 1}):
        assert served.post("/tokenize", **body).status_code == 400
    assert served.post("/detokenize", tokens=[10**9]).json()["error"]["param"] == "tokens"


def test_timings_and_rounds_on_request(served: Served) -> None:
    answer = served.chat("abcdefghij" * 4, timings_per_token=True, return_rounds=True, num_speculative_tokens=4)
    timings, (choice,) = answer["timings"], answer["choices"]
    rounds = choice["rounds"]
    assert timings["predicted_n"] == 41 and timings["draft_n"] == sum(r["num_draft_tokens"] for r in rounds) > 0
    assert timings["draft_n_accepted"] == sum(r["num_accepted_tokens"] for r in rounds) < timings["draft_n"]
    tokens = [token for r in rounds for token in r["tokens"]]
    assert "".join(token["text"] for token in tokens) == choice["message"]["content"]
    assert sum(token["origin"] == "draft" for token in tokens) == timings["draft_n_accepted"]
    assert "timings" not in served.chat("x") and "rounds" not in served.chat("x")["choices"][0]


def test_metrics_by_vllm_s_names(served: Served) -> None:
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
    before = [served.metric(f"vllm:spec_decode_{name}_total") for name in names]
    timings = served.chat("abcdefghij" * 4, timings_per_token=True, num_speculative_tokens=4)["timings"]
    drafts, drafted, accepted, by_position = (
        served.metric(f"vllm:spec_decode_{name}_total") - old for name, old in zip(names, before, strict=True)
    )
    assert 0 < drafts < drafted == timings["draft_n"] and accepted == by_position == timings["draft_n_accepted"]
    text = served.client.get("/metrics").text
    assert 'position="3"' in text and 'model_name="parrot"' in text
    for name in ("num_requests_running", "num_requests_waiting", "time_to_first_token_seconds_bucket"):
        assert f"vllm:{name}{{" in text
    for name in ("prefix_cache_queries_total", "prefix_cache_hits_total", "generation_tokens_total"):
        assert served.metric(f"vllm:{name}") > 0
