"""A Ray cluster of this machine: texts are the library's, prefixes keep their replica, and a killed one is survived."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import specrt
from specrt.engines.errors import BackendError
from tests.tools.serving.serving import events, wait_until

ray: Any = pytest.importorskip("ray", reason="Ray is not installed: pip install 'specrt[ray]'")
pytestmark = pytest.mark.slow

KEY = "k1"
LONG = 400  # tokens; a text that takes a while


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of 4 logical CPUs in processes of its own."""
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


@pytest.fixture(scope="module")
def url(cluster: str, tiny_bundle: Path) -> Iterator[str]:
    """Two replicas, one text at a time in each."""
    from ray import serve

    from specrt.serving.ray import app
    from specrt.serving.service import Limits

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    options: dict[str, Any] = {"served_model_name": ["tiny"], "api_keys": [KEY]}
    application = app(tiny_bundle, 2, limits=Limits(max_concurrency=2, max_body_bytes=1 << 16), **options)
    serve.run(application, name="specrt", route_prefix="/llm")
    yield f"http://127.0.0.1:{port}/llm"
    serve.shutdown()


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60, headers={"Authorization": f"Bearer {KEY}"}) as client:
        wait_until(lambda: len(counts(client)) == 2, 60)
        yield client


def counts(client: httpx.Client, name: str = "prefix_cache_hits_total") -> dict[str, float]:
    """The counter of each replica."""
    pattern = rf'^vllm:{name}{{model_name="tiny",replica="(\w+)"}} (\S+)$'
    return {name: float(value) for name, value in re.findall(pattern, client.get("/metrics").text, re.MULTILINE)}


def complete(client: httpx.Client, prompt: str, **body: Any) -> tuple[str, str, int]:
    """(text, replica, reused tokens of the prompt)"""
    session = body.pop("session", None)
    headers = {"x-session-id": session} if session else {}
    response = client.post("/v1/completions", json={"prompt": prompt, **body}, headers=headers)
    assert response.status_code == 200, response.text
    answer = response.json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["text"], response.headers["x-specrt-replica"], cached


def test_texts_are_the_librarys_and_a_prefix_keeps_its_replica(client: httpx.Client, tiny_bundle: Path) -> None:
    prompts = [f"{number} dogs and {number} cats" for number in range(8)]
    hits, replicas = sum(counts(client).values()), {}
    with specrt.load(tiny_bundle, threads=1) as runtime:
        for seed, prompt in enumerate(prompts):
            wanted = runtime.generate(prompt, max_new_tokens=24, seed=seed, temperature=1.0).text
            text, replicas[prompt], cached = complete(client, prompt, max_tokens=24, seed=seed)
            assert text == wanted
            again = complete(client, prompt, max_tokens=24, seed=seed, stream=False)
            assert again[:2] == (wanted, replicas[prompt]) and again[2] > cached
            streamed = client.post("/v1/completions", json=dict(prompt=prompt, max_tokens=24, seed=seed, stream=True))
            assert streamed.headers["x-specrt-replica"] == replicas[prompt]
            assert "".join(chunk["choices"][0]["text"] for chunk in events(streamed)) == wanted
    assert set(replicas.values()) == set(counts(client))  # both; the chance of another outcome is 2^-7
    assert sum(counts(client).values()) > hits
    of_session = {complete(client, prompt, max_tokens=2, session="a")[1] for prompt in prompts}
    assert len(of_session) == 1


def test_answers_are_those_of_the_server(client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    wrong = client.post("/v1/completions", json={"prompt": "a", "tempersture": 1})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tempersture")
    assert client.post("/v1/completions", content=b"{", headers={"Content-Type": "application/json"}).status_code == 400
    assert client.post("/v1/completions", json={"prompt": "a" * (1 << 17)}).status_code == 413
    assert client.get("/v1/models", headers={"Authorization": "Bearer k2"}).status_code == 401
    assert client.get("/nothing").json()["error"]["code"] == "not_found"


def test_a_client_that_leaves_ends_its_request(client: httpx.Client) -> None:
    before = sum(counts(client, "request_cancelled_total").values())
    body = {"prompt": "a", "max_tokens": LONG, "n": 16, "ignore_eos": True}
    with pytest.raises(httpx.TimeoutException):
        client.post("/v1/completions", json=body, timeout=0.2)
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        next(response.iter_lines())
    wait_until(lambda: sum(counts(client, "request_cancelled_total").values()) == before + 2)
    wait_until(lambda: not any(counts(client, "num_requests_running").values()))


def test_a_busy_replica_comes_after_the_other(client: httpx.Client) -> None:
    """Two requests at a time are not too many for a replica; the next ones go to the other, and come back later.

    The texts of each take long enough for the answers of the others.
    """
    first = complete(client, "a", max_tokens=1, session="s")[1]
    body = {"prompt": "a", "max_tokens": LONG, "n": 16, "num_speculative_tokens": 0, "ignore_eos": True, "stream": True}
    reading = []  # a reader that is forgotten closes its connection
    with ExitStack() as running:
        for _ in range(2):
            asked = client.stream("POST", "/v1/completions", json=body, headers={"x-session-id": "s"})
            response = running.enter_context(asked)
            assert response.status_code == 200, response.read()
            reading.append(response.iter_lines())
            next(reading[-1])  # now the gateway has counted it
            assert response.headers["x-specrt-replica"] == first
        assert first not in {complete(client, "a", max_tokens=1, session="s")[1] for _ in range(2)}
    wait_until(lambda: complete(client, "a", max_tokens=1, session="s")[1] == first)


def kill(replica: str) -> None:
    actor = ray.get_actor(f"SERVE_REPLICA::specrt#Engine#{replica}", namespace="serve")
    ray.kill(actor, no_restart=True)


def test_the_retry_of_a_client_survives_a_killed_replica(client: httpx.Client, url: str, tiny_bundle: Path) -> None:
    """A whole answer is repeated by the client itself; a stream that has begun ends with an error event."""
    options: dict[str, Any] = {"model": "tiny", "prompt": "The dogs", "max_tokens": LONG, "temperature": 0, "n": 8}
    api = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=8)
    replica = complete(client, "The dogs", max_tokens=1)[1]
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.append(
            api.completions.with_raw_response.create(**options, extra_body={"ignore_eos": True})
        )
    )
    asking.start()
    wait_until(lambda: counts(client, "num_requests_running").get(replica, 0) > 0)
    kill(replica)
    asking.join(60)
    (answer,) = answers
    assert answer.headers["x-specrt-replica"] != replica and answer.retries_taken > 0
    with specrt.load(tiny_bundle, threads=1) as runtime:
        wanted = runtime.generate("The dogs", max_new_tokens=LONG, temperature=0, ignore_eos=True).text
    assert {choice.text for choice in answer.parse().choices} == {wanted}

    wait_until(lambda: len(counts(client)) == 2, 60)  # Ray Serve has made another
    replica = complete(client, "The dogs", max_tokens=1)[1]
    stream = api.completions.create(**options, stream=True, extra_body={"ignore_eos": True})
    next(stream)
    kill(replica)
    with pytest.raises(openai.APIError, match="short of a replica"):
        list(stream)
    assert complete(client, "The dogs", max_tokens=LONG, temperature=0, ignore_eos=True)[0] == wanted


def test_requests_end_before_the_replicas_do(cluster: str, url: str, tiny_bundle: Path) -> None:
    """Settings for autoscaling are Ray Serve's."""
    from ray import serve

    from specrt.serving.ray import build

    scaling = {"min_replicas": 1, "max_replicas": 2, "initial_replicas": 2}
    arguments = {
        "bundle": str(tiny_bundle),
        "autoscaling_config": json.dumps(scaling),
        "ray_actor_options": '{"num_cpus": 0}',
        "drain_timeout_s": "300",  # on a busy machine the texts take more than the default
    }
    serve.run(build(arguments), name="second", route_prefix="/second")
    states = serve.status().applications["second"].deployments["Engine"].replica_states
    assert {str(getattr(state, "value", state)): count for state, count in states.items()} == {"RUNNING": 2}
    answers: list[httpx.Response] = []
    body = {"prompt": "a", "max_tokens": LONG, "n": 8, "ignore_eos": True, "stream": True}
    second = url.replace("/llm", "/second")
    asking = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{second}/v1/completions", json=body, timeout=60))
    )
    asking.start()
    running = re.compile(r"^vllm:num_requests_running{.*} 4\.0$", re.MULTILINE)
    wait_until(lambda: running.search(httpx.get(f"{second}/metrics").text) is not None)
    serve.delete("second")
    asking.join(60)
    chunks = events(answers[0])
    assert sum(chunk["choices"][0]["finish_reason"] == "length" for chunk in chunks) == 8
    assert httpx.get(f"{second}/health").status_code == 404


def batch(tiny_bundle: Path, folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "specrt.tools.cli", "batch", str(tiny_bundle), str(folder / "in.jsonl")]
    command += [str(folder / "out.jsonl"), "--max-concurrency", "2", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def answers_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines(keepends=True) if text.endswith("\n")]


def test_a_batch_on_a_cluster_is_resumed_after_signals(cluster: str, tiny_bundle: Path, tmp_path: Path) -> None:
    """The driver is killed, then an actor; all answers are there once, and are those of this machine."""
    body = {"max_tokens": 160, "ignore_eos": True}
    lines = [
        {
            "custom_id": str(n),
            "method": "POST",
            "url": "/v1/completions",
            "body": {**body, "prompt": f"The {n}", "seed": n},
        }
        for n in range(40)
    ]
    lines[7]["body"] = {"prompt": "a", "nope": 1}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = tmp_path / "out.jsonl"
    for sent, code in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        with batch(tiny_bundle, tmp_path, "--ray", cluster, "--ray-actors", "2") as process:
            wait_for_more_answers(output)
            refused = batch(tiny_bundle, tmp_path, "--ray", cluster)
            assert refused.communicate()[1].splitlines()[-1].startswith(f"specrt: error: {output}: another process")
            assert refused.returncode == 8
            process.send_signal(sent)
        assert process.returncode == code
    killed = answers_in(output)
    assert len(killed) < len(lines)
    with batch(tiny_bundle, tmp_path, "--ray", cluster, "--ray-actors", "1") as process:
        wait_for_more_answers(output)
        os.kill(actor_pid(), signal.SIGKILL)
        errors = process.communicate()[1].splitlines()
    assert process.returncode == 1 and errors[-1].startswith("specrt: error: 1 of 40 answers are errors"), errors
    got = {answer["custom_id"]: answer["response"] for answer in answers_in(output)}
    assert len(answers_in(output)) == len(got) == len(lines) and answers_in(output)[: len(killed)] == killed
    assert got["7"]["status_code"] == 400
    with specrt.load(tiny_bundle, threads=1) as runtime:
        for number in (0, 20, 39):
            wanted = runtime.generate(
                f"The {number}", max_new_tokens=160, seed=number, temperature=1.0, ignore_eos=True
            )
            assert got[str(number)]["body"]["choices"][0]["text"] == wanted.text


def wait_for_more_answers(path: Path) -> None:
    before = len(answers_in(path)) if path.exists() else 0
    wait_until(lambda: path.exists() and len(answers_in(path)) > before, 90)


def actor_pid() -> int:
    """The process of an actor that answers."""
    import psutil

    end = time.monotonic() + 60
    while time.monotonic() < end:
        for process in psutil.process_iter(["pid", "cmdline"]):
            if "MapWorker" in "".join(process.info["cmdline"] or []):
                return int(process.info["pid"])
    raise AssertionError("no actor")


def test_an_address_without_a_cluster_is_one_line(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(
        json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}})
    )
    process = batch(tiny_bundle, tmp_path, "--ray", "127.0.0.1:1")
    errors = process.communicate()[1].splitlines()
    assert process.returncode == BackendError.exit_code, errors
    assert errors[-1].startswith("specrt: error: --ray: no cluster at '127.0.0.1:1'")
