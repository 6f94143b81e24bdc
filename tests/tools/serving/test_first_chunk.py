"""The first token: its chunk is sent before the next round begins, and slots are ready for the first request."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from specrt.runtime.runtime import load
from specrt.serving import app as app_module
from specrt.serving import exchange as exchange_module
from specrt.serving import service as service_module
from specrt.serving.exchange import Exchange
from specrt.serving.protocol.requests import chat_request, completion_request
from specrt.serving.service import Config, Job, Limits, Service
from tests.tools.serving.serving import Served, events, user

FOREVER_S = 15.0


@pytest.fixture
def patient(served: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    """Waits without a limit, so that a wait for nothing is seen."""
    monkeypatch.setattr(service_module, "_FIRST_CHUNK_S", FOREVER_S)
    return served


def tokens_at_first_chunk(served: Served, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many tokens there are when the chunk of the first token is sent, by a slow event loop."""
    found = list[int]()
    stream = Exchange._stream

    async def watched(self: Exchange, send: Any) -> None:
        async def seen(message: Any) -> None:
            if message["type"] == "http.response.body" and not found:
                time.sleep(0.2)
                found.append(self._job.choices[0].num_tokens)
            await send(message)

        await stream(self, seen)

    monkeypatch.setattr(Exchange, "_stream", watched)
    text = "".join(
        chunk["choices"][0]["delta"].get("content", "")
        for chunk in events(served.post("/v1/chat/completions", messages=user("a" * 40), stream=True))
    )
    assert text == "a" * 40
    return found[0]


def test_the_first_chunk_is_sent_before_the_next_round(patient: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tokens_at_first_chunk(patient, monkeypatch) == 1


def test_without_the_wait_rounds_go_on(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(service_module, "_FIRST_CHUNK_S", 0.0)
    assert tokens_at_first_chunk(served, monkeypatch) > 1


def test_a_client_on_this_machine_has_time_to_read(patient: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next round waits for the chunk, and then for the client."""
    monkeypatch.setattr(exchange_module, "_CLIENT_S", 0.3)
    times, stream = list[float](), Exchange._stream

    async def watched(self: Exchange, send: Any) -> None:
        async def seen(message: Any) -> None:
            await send(message)
            times.append(time.monotonic())

        await stream(self, seen)

    monkeypatch.setattr(Exchange, "_stream", watched)
    events(patient.post("/v1/chat/completions", messages=user("a" * 40), stream=True))
    _, first, second, *_ = times  # of the head, and of two chunks
    assert second - first > 0.25


@pytest.mark.parametrize("is_early", [False, True], ids=["", "control"])
def test_the_event_loop_has_nothing_to_do_when_the_pass_begins(
    served: Served, monkeypatch: pytest.MonkeyPatch, is_early: bool
) -> None:
    """The request is queued when all tasks of its exchange wait. The control queues it when the exchange is made."""
    waiting, found = list[str](), list[list[str]]()
    until_disconnect, deltas, submit = exchange_module._until_disconnect, Exchange._deltas, Service.submit

    async def watched_disconnect(receive: Any) -> None:
        waiting.append("disconnect")
        await until_disconnect(receive)

    async def watched_deltas(self: Exchange) -> Any:
        waiting.append("deltas")
        async for delta in deltas(self):
            yield delta

    def watched_submit(self: Service, job: Job) -> None:
        found.append(sorted(waiting))
        submit(self, job)

    class Early(Exchange):
        def __init__(self, service: Service, wanted: Any, job: Job) -> None:
            super().__init__(service, wanted, job)
            service.submit(job)
            monkeypatch.setattr(Service, "submit", lambda *_: None)

    monkeypatch.setattr(exchange_module, "_until_disconnect", watched_disconnect)
    monkeypatch.setattr(Exchange, "_deltas", watched_deltas)
    monkeypatch.setattr(Service, "submit", watched_submit)
    if is_early:
        monkeypatch.setattr(app_module, "Exchange", Early)
    assert served.chat("x" * 9)["choices"][0]["message"]["content"] == "x" * 9
    assert found == [[] if is_early else ["deltas", "disconnect"]]


def test_nothing_waits_for_a_chunk_that_is_not_sent(patient: Served) -> None:
    """Whole answers, texts whose first token has no text yet, several choices, and clients that left."""
    started = time.monotonic()
    assert patient.chat("x" * 9)["choices"][0]["message"]["content"] == "x" * 9
    for body in ({"messages": user("äöü")}, {"messages": user("x" * 9), "n": 3}, {"messages": user("y" * 300)}):
        assert len(events(patient.post("/v1/chat/completions", **body, stream=True))) > 2
    with patient.client.stream("POST", "/v1/chat/completions", json={"messages": user("z" * 400), "stream": True}):
        pass
    assert patient.chat("x")["choices"][0]["message"]["content"] == "x"
    assert time.monotonic() - started < FOREVER_S


def test_each_slot_has_read_the_beginning_of_the_template_and_opened_its_samplers(parrot_bundle: Path) -> None:
    limits = Limits(max_concurrency=3)
    with closing(Service(load(parrot_bundle), Config(["parrot"], limits))) as service:
        service.warm_up()
        assert service.runtime.num_idle_slots == 3
        streams = [service.runtime.stream(user(letter), temperature=1.0, seed=1) for letter in "abc"]
        for stream in streams:
            next(stream.steps)
        assert [stream.stats.reused_prompt_tokens for stream in streams] == [1, 1, 1]
        for stream in streams:
            stream.close()


def test_short_plain_prompts_are_prepared_in_the_event_loop(served: Served) -> None:
    def is_quick(**body: Any) -> bool:
        read = chat_request if "messages" in body else completion_request
        return served.service.prepares_quickly(read(body, served.service.config.defaults))

    assert is_quick(prompt="x" * 2048) and is_quick(prompt=[1, 2], n=2)
    assert not is_quick(prompt="x" * 2049) and not is_quick(prompt=["x"] * 3) and not is_quick(prompt="x", n=3)
    assert not is_quick(prompt="x", structured_outputs={"regex": "a"})
    chat = {"messages": user("x")}
    assert is_quick(**chat) and not is_quick(**chat, chat_template_kwargs={"documents": [{"text": "x" * 9000}]})
