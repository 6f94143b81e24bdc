"""Requests that are refused before a prompt is encoded, and the headers that browsers need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specrt.engines.errors import UsageError
from specrt.runtime.runtime import load
from specrt.serving.guard import checked_origins
from specrt.serving.service import Config, Service
from tests.tools.serving.parrot import CONTEXT
from tests.tools.serving.serving import Served, serving, user

PAGE = "http://localhost:3000"
ASK = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(served: Served, monkeypatch: Any) -> None:
    """Encoding takes memory of 100 times the size of a text."""
    codec = served.service.runtime.codec
    monkeypatch.setattr(codec, "ids_of_text", lambda *_, **__: pytest.fail("it was encoded"))
    text = "x" * (CONTEXT * codec.max_token_chars + 1)
    tool = {"type": "function", "function": {"name": "f", "description": text}}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [*user("x"), *user(text)]}),
        ("/v1/chat/completions", {"messages": user("x"), "tools": [tool]}),
        ("/v1/completions", {"prompt": text}),
    ]
    for path, body in bodies:
        response = served.post(path, **body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"echo": True, "logprobs": 1}, "echo"), ({"suffix": "x"}, "suffix"), ({"best_of": 2}, "best_of")],
)
def test_what_completions_do_not_have_is_a_400(served: Served, fields: dict[str, Any], param: str) -> None:
    response = served.post("/v1/completions", prompt="x", **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_pages_of_an_allowed_origin_can_use_the_api(parrot_bundle: Path) -> None:
    keys, origins = [b"key"], checked_origins([PAGE])
    with serving(lambda: Service(load(parrot_bundle), Config(["parrot"])), keys, True, origins) as served:
        url, key = "/v1/chat/completions", {"Authorization": "Bearer key"}
        for origin, allowed in ((PAGE, PAGE), ("http://elsewhere", None)):
            asked = served.client.options(url, headers={"Origin": origin, **ASK})  # without a key
            assert asked.headers.get("Access-Control-Allow-Origin") == allowed
            assert asked.status_code == (200 if allowed else 400)
            for headers, status in ((key, 200), ({}, 401)):
                done = served.client.post(url, json={"messages": user("x")}, headers={"Origin": origin, **headers})
                assert (done.status_code, done.headers.get("Access-Control-Allow-Origin")) == (status, allowed)
        assert (
            "authorization"
            in served.client.options(url, headers={"Origin": PAGE, **ASK}).headers["Access-Control-Allow-Headers"]
        )


def test_without_the_option_no_page_can(served: Served) -> None:
    response = served.client.options("/v1/models", headers={"Origin": PAGE, **ASK})
    assert response.status_code == 405 and "Access-Control-Allow-Origin" not in response.headers


def test_an_origin_is_a_scheme_and_a_host() -> None:
    assert checked_origins(["*", "https://Chat.example", "app://x"]) == ["*", "https://chat.example", "app://x"]
    for origin in ("localhost:3000", "http://x/", "http://x/path", "", "http://u@x"):
        with pytest.raises(UsageError, match="--cors-origin: got"):
            checked_origins([origin])


def test_the_first_structured_request_finds_the_tokenizer_of_grammars(served: Served, monkeypatch: Any) -> None:
    """It takes 0.4 s."""
    served.service.warm_up()
    monkeypatch.setattr("llguidance.LLTokenizer", lambda *_, **__: pytest.fail("it was made in a request"))
    answer = served.chat("xyx", structured_outputs={"regex": "[xy]{3}"})
    assert answer["choices"][0]["message"]["content"] == "xyx"
