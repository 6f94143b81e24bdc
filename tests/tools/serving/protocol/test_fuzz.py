"""Requests at random: whatever is sent is answered, or refused with a line that names the field. Never a fault."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.serving.serving import Served, user

TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "1", "index": 0, "type": "function", "function": {"name": "f", "arguments": "{}"}}
PART = {"type": "text", "text": "x"}
SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"40": 1},
    "stop": ["zz"],
    "stop_token_ids": [7],
    "min_tokens": 1,
    "n": 1,
    "model": "parrot",
    "num_speculative_tokens": 2,
    "draft": "model",
    "rule": "match",
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "user": "u",
    "return_rounds": True,
    "timings_per_token": True,
}
CHAT: dict[str, Any] = {
    **SAMPLING,
    "messages": [*user("x"), {"role": "assistant", "tool_calls": [CALL]}, {"role": "user", "content": [PART]}],
    "max_tokens": 4,
    "logprobs": True,
    "top_logprobs": 2,
    "chat_template_kwargs": {"x": 1},
    "tools": [TOOL],
    "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [copy.deepcopy(TOOL)]}},
    "parallel_tool_calls": True,
    "add_generation_prompt": True,
}
del CHAT["tool_choice"]["allowed_tools"]["tools"][0]["function"]["description"]
del CHAT["tool_choice"]["allowed_tools"]["tools"][0]["function"]["parameters"]
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["ab"]}, "strict": True}}
Sent = tuple[str, dict[str, Any]]  # path and body
MARKS = (b'"', b"{", b"[", b"\0")
BODIES: list[Sent] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {"messages": user("x"), "max_tokens": 4, "response_format": FORMAT}),
    ("/v1/chat/completions", {"messages": user("x"), "max_tokens": 4, "structured_outputs": {"regex": "[ab]{3}"}}),
    ("/v1/completions", {**SAMPLING, "prompt": ["ab", "cd"], "max_tokens": 4, "logprobs": 2, "grammar": 'start: "a"'}),
    ("/v1/completions", {"prompt": [64, 65], "max_tokens": 2, "echo": True, "json_schema": {"enum": [1]}}),
    ("/tokenize", {"messages": user("x"), "tools": [TOOL], "return_token_strs": True, "with_pieces": True}),
    ("/tokenize", {"prompt": "x", "add_special_tokens": True}),
    ("/detokenize", {"tokens": [64, 65]}),
]
MODES = ("auto", "none", "required", "text", "json_object", "function", "assistant", "tool", "block")
WORDS = (*MODES, "", "x", "\ud800", "é\n")
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 2**31, 2**63, -(2**63), 10**300]),
    st.sampled_from([0.5, -0.0, 5e-324, 1e-300, 1e308, 1.0]),
    st.sampled_from(WORDS),
)
NAMES = st.sampled_from(("x", "type", "name", "index", "content", "", "40", "$ref", "enum", "\ud800", "a b"))
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(object or list, name or index) of everything in ``value``."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


@st.composite
def changed(draw: st.DrawFn) -> Sent:
    """A request with one to three changes anywhere in it."""
    path, body = draw(st.sampled_from(BODIES))
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(body))
        parent, key = draw(st.sampled_from(found)) if found else (body, "x")
        kind = draw(st.sampled_from(("value", "value", "value", "delete", "add")))
        if kind == "value" or (kind == "add" and isinstance(parent, list)):
            parent[key] = draw(VALUES)
        elif kind == "delete":
            del parent[key]
        else:
            parent[draw(NAMES)] = draw(VALUES)
    if draw(st.booleans()) and path.startswith("/v1"):
        body["stream"] = True
    return path, body


def send(served: Served, path: str, data: bytes) -> Any:
    """The error's object, or None. Checks that the answer is one or the other, and no fault."""
    response = served.client.post(path, content=data, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404), (response.status_code, response.text, data)
    if response.status_code == 200:
        if response.headers["content-type"].startswith("text/event-stream"):
            assert response.text.endswith("data: [DONE]\n\n") and '"internal_error"' not in response.text, data
        return None
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert "\n" not in error["message"] and len(error["message"]) < 1000, error
    return error


@given(changed())
def test_a_changed_request_is_answered_or_the_field_is_named(served: Served, sent: Sent) -> None:
    path, body = sent
    error = send(served, path, json.dumps(body).encode())
    if error is not None:
        assert error["param"] is not None, error  # a field may have the empty name
        first = error["param"].partition("[")[0].partition(".")[0]
        assert first in body or first in ("messages", "prompt", "tokens"), (error, body)


@given(st.sampled_from(BODIES), st.data())
def test_changed_bytes_are_never_a_fault(served: Served, sent: Sent, data: st.DataObject) -> None:
    path, body = sent
    raw = bytearray(json.dumps(body, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass"))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(len(raw) - 1, 0)))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3) | st.sampled_from(MARKS))
    send(served, path, bytes(raw))


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_the_requests_are_right_before_they_are_changed(served: Served, path: str, body: dict[str, Any]) -> None:
    assert send(served, path, json.dumps(body).encode()) is None
    assert served.client.get("/health").status_code == 200
