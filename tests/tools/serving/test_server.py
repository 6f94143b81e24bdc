"""The process: loading, the queue, clients that leave, deadlines, keys, and the end."""

from __future__ import annotations

import hmac
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from specrt.engines.errors import BundleError, ResourceError, UsageError
from specrt.runtime.runtime import load
from specrt.serving import bodies, exchange, server
from specrt.serving.app import create_app
from specrt.serving.guard import keys_from_file
from specrt.serving.server import Address, serve
from specrt.serving.service import Config, Limits, Service
from tests.tools.commands import invoke
from tests.tools.serving.parrot import held
from tests.tools.serving.serving import Served, serving, user, wait_until

LONG = {"messages": user("x" * 200), "max_tokens": 900, "ignore_eos": True}


def maker(bundle: Path, **limits: Any) -> Callable[[], Service]:
    return lambda: Service(load(bundle), Config(["parrot"], Limits(**limits)))


def raw_post(served: Served, body: Any) -> socket.socket:
    """A connection after a chat request, before anything is read."""
    port = int(served.url.rpartition(":")[2])
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(head_of("/v1/chat/completions", len(data)) + data)
    return connection


def head_of(path: str, length: int) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {length}")
    return "\r\n".join((*lines, "", "")).encode()


def test_it_answers_503_until_it_is_loaded(parrot_bundle: Path) -> None:
    may_load = threading.Event()

    def slow() -> Service:
        may_load.wait(20)
        return maker(parrot_bundle)()

    with serving(slow, is_ready=False) as served:
        wait_until(lambda: served.server.started)
        for response in (served.client.get("/health"), served.post("/v1/chat/completions", messages=user("x"))):
            assert response.status_code == 503 and response.headers["Retry-After"] == "1"
            assert response.json()["error"]["code"] == "loading"
        assert served.client.get("/").status_code == 200
        may_load.set()
        wait_until(lambda: served.client.get("/health").status_code == 200)
        assert served.chat("x")["choices"][0]["message"]["content"] == "x"


def test_a_bundle_that_does_not_load_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Service:
        raise BundleError("the bundle is damaged")

    monkeypatch.setattr(server, "log_to_stderr", lambda: None)  # it would stay for the tests after this one
    with pytest.raises(BundleError, match="damaged"):
        serve(Address(port=0), fails, lambda url, service: None)


def test_addresses_that_cannot_be_used() -> None:
    with Address(port=0).bind() as taken:
        taken.listen()
        with pytest.raises(ResourceError, match=r"--port: .* cannot be used"):
            Address(port=taken.getsockname()[1]).bind()
    with pytest.raises(UsageError, match="--host: 'no such host' is no address"):
        Address("no such host").bind()
    assert Address("localhost").is_loopback and Address("::1").is_loopback and not Address("0.0.0.0").is_loopback


def test_what_the_command_refuses_before_it_loads(parrot_bundle: Path, tmp_path: Path) -> None:
    with Address(port=0).bind() as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        for options, code, message in (
            ([], 8, "--port: 127.0.0.1 port"),
            (["--api-key-file", str(tmp_path / "none")], 2, "No such file"),
            (["--metrics-prefix", "a b"], 2, "--metrics-prefix: got 'a b'"),
            (["--generation-config", str(tmp_path / "none")], 2, "No such file"),
            (["--tool-parser", "other"], 2, "--tool-parser"),
            (["--cors-origin", "localhost"], 2, "--cors-origin: got 'localhost'"),
        ):
            result = invoke("serve", parrot_bundle, "--port", port, *options)
            assert result.exit_code == code and message in result.stderr.splitlines()[-1]
        result = invoke("serve", parrot_bundle, "--port", port, "--host", "0.0.0.0")
        warning, error = result.stderr.splitlines()
        assert warning.startswith("specrt: warning: other machines can reach 0.0.0.0") and "--port" in error
        warning, _ = invoke("serve", parrot_bundle, "--port", port, "--cors-origin", "*").stderr.splitlines()
        assert warning.startswith("specrt: warning: every web page can use the server")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_client_that_leaves_ends_its_request(parrot_bundle: Path, stream: bool, is_waiting: bool) -> None:
    """Also where the answer is not streamed; a request without a waiting client must not run to its end."""
    with serving(maker(parrot_bundle, max_concurrency=1)) as served:
        scheduler = served.service.scheduler
        with held():
            connections = [raw_post(served, {**LONG, "stream": stream})]
            wait_until(lambda: scheduler.num_running == 1)
            if is_waiting:
                connections.append(raw_post(served, {**LONG, "stream": stream}))
                wait_until(lambda: scheduler.num_waiting == 1)
                connections.pop().close()
                wait_until(lambda: scheduler.num_waiting == 0)
            for connection in connections:
                connection.close()
            wait_until(lambda: served.metric("vllm:request_cancelled_total") == 1 + is_waiting)
        wait_until(lambda: scheduler.num_running == 0)
        assert served.metric("vllm:generation_tokens_total") <= 1 and served.metric("vllm:num_idle_slots") == 1
        assert served.chat("after")["choices"][0]["message"]["content"] == "after"


def test_a_full_queue_is_429(parrot_bundle: Path) -> None:
    with serving(maker(parrot_bundle, max_concurrency=1, queue_size=1)) as served, held():
        connections = [raw_post(served, LONG)]
        wait_until(lambda: served.service.scheduler.num_running == 1)
        connections.append(raw_post(served, LONG))
        wait_until(lambda: served.service.scheduler.num_waiting == 1)
        refused = served.post("/v1/chat/completions", **LONG)
        assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        for connection in connections:
            connection.close()
        wait_until(lambda: served.service.scheduler.num_waiting == 0)


def test_a_deadline_is_504_before_the_first_token_and_an_event_after_it(parrot_bundle: Path) -> None:
    with serving(maker(parrot_bundle, max_concurrency=1, request_timeout_s=0.4)) as served:
        for stream in (False, True):
            with held():
                started = time.monotonic()
                response = served.post("/v1/chat/completions", **LONG, stream=stream)
            assert response.status_code == 504 and response.json()["error"]["code"] == "timeout"
            assert time.monotonic() - started < 10
            wait_until(lambda: served.service.scheduler.num_running == 0)
    with serving(maker(parrot_bundle, max_concurrency=1, request_timeout_s=2)) as served:
        texts: list[str] = []
        with served.client.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True}) as response:
            for line in response.iter_lines():
                if not texts:
                    holding = held()
                    holding.__enter__()
                texts.append(line)
            holding.__exit__(None, None, None)
        assert response.status_code == 200
        assert [json.loads(line[6:])["error"]["code"] for line in texts if '"error"' in line] == ["timeout"]
        wait_until(lambda: served.service.scheduler.num_running == 0)


def test_a_client_that_stops_reading_does_not_keep_its_request(
    parrot_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is larger than what the sockets hold, so that sending it waits for the client."""
    monkeypatch.setattr(exchange, "_SECONDS_TO_READ", 1.0)
    body = {**LONG, "stream": True, "n": 64, "logprobs": True, "top_logprobs": 20, "return_rounds": True}
    with serving(maker(parrot_bundle, max_concurrency=4, request_timeout_s=5)) as served:
        connection = raw_post(served, body)
        ended = "vllm:e2e_request_latency_seconds_count"
        wait_until(lambda: served.service.scheduler.num_running == 4)
        wait_until(lambda: served.service.scheduler.num_running == 0)
        assert served.metric(ended) == 0  # it still waits for its client
        wait_until(lambda: served.metric(ended) == 1)
        assert served.metric("vllm:num_idle_slots") == 4
        connection.close()


def test_draining_finishes_what_runs_and_takes_no_more(parrot_bundle: Path) -> None:
    answers: list[Any] = []
    with serving(maker(parrot_bundle, max_concurrency=1)) as served:
        with held():
            asking = threading.Thread(target=lambda: answers.append(served.chat("to the end", max_tokens=40)))
            asking.start()
            wait_until(lambda: served.service.scheduler.num_running == 1)
            served.server.stop()
            health = served.client.get("/health")
            assert health.status_code == 503 and health.json()["error"]["code"] == "draining"
            assert served.post("/v1/chat/completions", messages=user("x")).status_code == 503
        asking.join()
        wait_until(lambda: served.server.has_drained)
    assert answers[0]["choices"][0]["message"]["content"] == "to the end"


def test_health_reports_an_engine_that_has_stopped(parrot_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(rows: Any) -> Any:
        raise OSError("a bug")

    with serving(maker(parrot_bundle)) as served:
        monkeypatch.setattr(served.service.scheduler._runner, "run", fails)
        assert served.post("/v1/chat/completions", messages=user("x")).status_code == 500
        wait_until(lambda: not served.service.scheduler.is_alive)
        for response in (served.client.get("/health"), served.post("/v1/chat/completions", messages=user("x"))):
            assert response.status_code == 503 and response.json()["error"]["code"] == "stopped"


def test_a_slow_body_is_given_up(parrot_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.2)
    with serving(maker(parrot_bundle)) as served:
        connection = socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])))
        connection.sendall(head_of("/v1/completions", 99) + b"{")
        assert b" 408 " in connection.recv(200)
        connection.close()


def test_keys(
    parrot_bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("\nfirst-key\n second-key \n")
    keys = keys_from_file(file)
    file.write_text("\n \n")
    with pytest.raises(UsageError, match="--api-key-file"):
        keys_from_file(file)
    caplog.set_level(logging.INFO, "specrt.serving")
    with serving(maker(parrot_bundle), keys) as served:
        for value in (None, "Bearer", "Bearer wrong", "Basic first-key", "Bearer first-ke", "Bearer first-key2"):
            headers = {} if value is None else {"Authorization": value}
            for path in ("/v1/models", "/v1/nowhere", "/tokenize"):
                response = served.client.get(path, headers=headers)
                assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        for key in ("first-key", "second-key"):
            assert served.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        assert {served.client.get(path).status_code for path in ("/health", "/metrics", "/")} == {200}
        compared: list[bytes] = []
        compare = hmac.compare_digest

        def comparing(given: bytes, key: bytes) -> bool:
            compared.append(key)
            return compare(given, key)

        monkeypatch.setattr(hmac, "compare_digest", comparing)
        assert served.client.get("/v1/models", headers={"Authorization": "Bearer first-key"}).status_code == 200
        assert compared == keys == [b"first-key", b"second-key"], "with all of them, in constant time"
        body = {"messages": user("a secret text")}
        served.client.post("/v1/chat/completions", json=body, headers={"Authorization": "Bearer first-key"})
    assert "POST /v1/chat/completions 200" in caplog.text and "completion_tokens=14" in caplog.text
    assert "secret" not in caplog.text and "first-key" not in caplog.text


def test_an_application_under_a_prefix_has_keys_and_both_endpoints(parrot_bundle: Path) -> None:
    service = maker(parrot_bundle)()
    app = Starlette(routes=[Mount("/llm", app=create_app(service, [b"k"]))])
    try:
        client = TestClient(app, base_url="http://test/llm/")
        assert client.get("v1/models").status_code == 401
        client.headers["Authorization"] = "Bearer k"
        chat = client.post("v1/chat/completions", json={"messages": user("Hello")}).json()
        assert chat["choices"][0]["message"]["content"] == "Hello"
        assert client.post("v1/completions", json={"prompt": "Hello", "max_tokens": 2}).json()["choices"][0]["text"]
    finally:
        service.close()


def test_a_prompt_that_begins_as_another_finds_its_slot(parrot_bundle: Path) -> None:
    """Two conversations in turn: each finds its own slot, and the metrics count what it found."""
    with serving(maker(parrot_bundle, max_concurrency=2)) as served:
        talks = {"a": user("a" * 100), "b": user("b" * 120)}
        for turn in range(3):
            for name, messages in talks.items():
                answer = served.post("/v1/chat/completions", messages=messages, max_tokens=30).json()
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached >= (100 if turn else 0), (turn, name, cached)
                messages += [answer["choices"][0]["message"], *user(f"{name} again")]
        assert served.metric("vllm:prefix_cache_hits_total") > 500
        assert served.metric("vllm:prefix_cache_queries_total") > served.metric("vllm:prefix_cache_hits_total")


def test_a_common_system_prompt_is_found_and_a_long_conversation_stays(parrot_bundle: Path) -> None:
    """Four conversations on three slots. The long one keeps its slot while short ones come and go."""
    system = [{"role": "system", "content": "s" * 60}]
    with serving(maker(parrot_bundle, max_concurrency=3)) as served:

        def cached(messages: list[dict[str, str]]) -> int:
            answer = served.post("/v1/chat/completions", messages=messages, max_tokens=20).json()
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        long = [*system, *user("a" * 300)]
        assert cached(long) == 0
        for index, name in enumerate("bcdef"):
            found = cached([*system, *user(name * 40)])
            assert found >= (60 if index > 1 else 0), "once per slot it is computed"
            assert cached(long) >= 350, name
