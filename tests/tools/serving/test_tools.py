"""Tools over HTTP: what the template gets, and calls in whole answers and in streams."""

from __future__ import annotations

import json
from typing import Any

import openai
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from tests.tools.serving.serving import Served, events, user

CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Ulm"}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "of a city", "parameters": {}}}


def test_a_call_is_in_the_message_and_no_text(served: Served) -> None:
    choice = served.chat(f"Let me see. {CALL}", tools=[TOOL])["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me see."
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"]["name"] == "get_weather" and json.loads(call["function"]["arguments"]) == {"city": "Ulm"}
    assert served.chat(CALL, tools=[TOOL])["choices"][0]["message"]["content"] is None


def test_a_stream_has_id_and_name_then_arguments_and_logprobs_go_with_tools(served: Served) -> None:
    body: dict[str, Any] = {"messages": user(f"Hm. {CALL}{CALL}"), "tools": [TOOL], "stream": True, "logprobs": True}
    chunks = [chunk["choices"][0] for chunk in events(served.post("/v1/chat/completions", **body))]
    assert all(len(chunk["delta"].get("tool_calls", [{}])) == 1 for chunk in chunks), "one entry a chunk"
    entries = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    for index in (0, 1):
        first, *others = [entry for entry in entries if entry["index"] == index]
        assert first["id"] and first["type"] == "function"
        assert first["function"] == {"name": "get_weather", "arguments": ""}
        assert len(others) > 1 and all(set(entry) == {"index", "function"} for entry in others)
        assert all(set(entry["function"]) == {"arguments"} for entry in others)
        assert "".join(entry["function"]["arguments"] for entry in others) == '{"city": "Ulm"}'
    assert len({entry["id"] for entry in entries if "id" in entry}) == 2
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == "Hm."
    assert chunks[-1]["finish_reason"] == "tool_calls"
    tokens = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    assert bytes(b for entry in tokens[:-1] for b in entry["bytes"]).decode() == f"Hm. {CALL}{CALL}"


def test_chunks_of_any_size_give_the_same_calls(served: Served) -> None:
    """Characters of several tokens in arguments and content, and a stop string, which may be cut by chunks."""
    named = '{"name": "get_weather", "arguments": {"city": "Köln €", "n": 1}}'
    text = f"Größe: <tool_call>{named}</tool_call><tool_call>{named}</tool_call> é STOP more"
    for stop, num_calls in (("ST", 2), ('"n"', 1), ("€", 1)):
        body: dict[str, Any] = {"messages": user(text), "tools": [TOOL], "stop": [stop], "temperature": 0}
        found = []
        for k in range(5):
            whole = served.post("/v1/chat/completions", **body, num_speculative_tokens=k).json()["choices"][0]
            calls = [call["function"]["arguments"] for call in whole["message"]["tool_calls"]]
            chunks = events(served.post("/v1/chat/completions", **body, num_speculative_tokens=k, stream=True))
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            entries = [entry for delta in deltas for entry in delta.get("tool_calls", [])]
            pieces = ["".join(e["function"]["arguments"] for e in entries if e["index"] == i) for i in range(num_calls)]
            assert pieces == calls and chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
            assert "".join(delta.get("content", "") for delta in deltas) == whole["message"]["content"]
            found.append((calls, whole["message"]["content"], whole["finish_reason"]))
        assert len(found[0][0]) == num_calls and all(entry == found[0] for entry in found)
        assert found[0][0][-1] == '{"city": "Köln €", "n": 1}'.partition(stop)[0]


def test_arguments_that_are_cut_are_sent_as_far_as_they_go(served: Served) -> None:
    start = CALL.index("Ulm")
    choice = served.chat(CALL, tools=[TOOL], max_tokens=start)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'


def test_without_parallel_calls_the_first_one_ends_the_answer(served: Served) -> None:
    for stream in (False, True):
        body = {"messages": user(CALL * 5), "tools": [TOOL], "parallel_tool_calls": False, "stream": stream}
        response = served.post("/v1/chat/completions", **body)
        if stream:
            deltas = [chunk["choices"][0]["delta"] for chunk in events(response)]
            calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        else:
            (choice,) = response.json()["choices"]
            calls = choice["message"]["tool_calls"]
            assert choice["finish_reason"] == "tool_calls"
            assert response.json()["usage"]["completion_tokens"] < 2 * len(CALL)
        assert len({call.get("index") for call in calls}) == 1
        assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Ulm"}'


def test_an_answer_that_is_cut_has_finish_reason_length(served: Served) -> None:
    choice = served.chat(CALL + CALL, tools=[TOOL], max_tokens=len(CALL) + 5)["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "length"


def test_none_may_be_called(served: Served) -> None:
    """The template does not get the tools, and the text is not parsed."""
    choice = served.chat(CALL, tools=[TOOL], tool_choice="none")["choices"][0]
    assert choice["message"]["content"] == CALL and "tool_calls" not in choice["message"]
    tokens = [served.post("/tokenize", messages=user("x"), tools=tools).json()["count"] for tools in ([TOOL], [])]
    assert tokens[0] > tokens[1]


def test_a_conversation_with_calls_and_results(served: Served) -> None:
    message = served.chat(CALL, tools=[TOOL])["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
    messages = [*user(CALL), message, result, *user("thanks")]
    ids = served.post("/tokenize", messages=messages, tools=[TOOL]).json()["tokens"]
    text = served.service.runtime.codec.decode(ids)
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Ulm"}}</tool_call>' in text  # an object, parsed
    assert served.post("/v1/chat/completions", messages=messages, tools=[TOOL]).status_code == 200


def test_a_template_without_tools_is_an_error(served: Served, monkeypatch: Any) -> None:
    monkeypatch.setattr(served.service.runtime.codec, "template", lambda chat: "{{ messages }}")
    response = served.post("/v1/chat/completions", messages=user("x"), tools=[TOOL])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


def test_the_official_client_gets_calls_whole_and_in_streams(served: Served) -> None:
    messages: Any = user(f"Let me see. {CALL}")
    tools: Any = [TOOL]
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model="parrot", messages=messages, tools=tools, tool_choice="auto")
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.type == "function" and call.function.name == "get_weather" and call.id
        with client.chat.completions.stream(model="parrot", messages=messages, tools=tools) as stream:
            final = stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments == '{"city": "Ulm"}'
    assert final.choices[0].message.content == "Let me see." and final.choices[0].finish_reason == "tool_calls"


def test_langchain_gets_calls(served: Served) -> None:
    chat = ChatOpenAI(model="parrot", base_url=f"{served.url}/v1", api_key=SecretStr("none"), max_retries=0)
    caller = chat.bind_tools([TOOL])
    message = caller.invoke(CALL)
    assert [(call["name"], call["args"]) for call in message.tool_calls] == [("get_weather", {"city": "Ulm"})]
    whole: Any = None
    for chunk in caller.stream(CALL + CALL):
        whole = chunk if whole is None else whole + chunk
    assert [call["name"] for call in whole.tool_calls] == ["get_weather"] * 2
