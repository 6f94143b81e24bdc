"""Routing keys: the turns of a conversation have the same one, other conversations another."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from specrt.serving.protocol.routing import PREFIX_CHARS, ranked, routing_key


def key(headers: dict[str, str] | None = None, **body: Any) -> str:
    return routing_key(headers or {}, json.dumps(body).encode())


def chat(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [
        {"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(contents)
    ]


def test_all_turns_of_a_conversation_have_one_key() -> None:
    first = key(messages=chat("Hello", system="Be brief."))
    assert key(messages=chat("Hello", "Hi.", "And?", system="Be brief."), temperature=0.5) == first
    assert key(messages=chat("Goodbye", system="Be brief.")) != first
    assert key(messages=chat("Hello", system="Be long.")) != first
    assert key(messages=chat("Hello", system="Be brief."), tools=[{"type": "function"}]) != first


def test_a_long_common_beginning_is_enough() -> None:
    long = "x" * PREFIX_CHARS
    assert key(messages=chat("Hello", system=long)) == key(messages=chat("Goodbye", system=long))
    assert key(prompt=long + "a") == key(prompt=long + "b") != key(prompt="a")
    assert key(prompt=[1] * PREFIX_CHARS + [2]) == key(prompt=[1] * PREFIX_CHARS) != key(prompt=[2])
    assert key(prompt=["a", "b"]) == key(prompt="a")


def test_a_session_comes_before_the_cache_key_and_that_before_the_prompt() -> None:
    session = {"x-session-id": "7"}
    assert key(session, prompt="a", prompt_cache_key="k") == key(session, prompt="b") != key(prompt="b")
    assert key(prompt="a", prompt_cache_key="k") == key(prompt="b", prompt_cache_key="k") != key(prompt="b")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"5",
        b"{}",
        b'{"prompt": 5}',
        b'{"messages": 5}',
        b'{"messages": []}',
        b'{"prompt": []}',
    ],
)
def test_what_is_no_request_has_no_key(body: bytes) -> None:
    assert routing_key({}, body) == ""


@pytest.mark.parametrize("body", [b'{"messages": [5, null]}', b'{"prompt": [null]}', b'{"prompt": "\\ud800"}'])
def test_a_malformed_request_is_not_an_error_here(body: bytes) -> None:
    assert isinstance(routing_key({}, body), str)


def test_a_server_that_goes_moves_its_own_keys_only() -> None:
    servers, keys = ["a", "b", "c", "d"], [str(number) for number in range(400)]
    before = {key: ranked(key, servers) for key in keys}
    counts = Counter(order[0] for order in before.values())
    assert min(counts.values()) > 60  # 100 each, standard deviation 8.7
    assert all(ranked(key, ["d", "a", "b"]) == [name for name in before[key] if name != "c"] for key in keys)
