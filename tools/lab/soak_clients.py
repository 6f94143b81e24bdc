"""The clients of the soak: each is a function (server, job, chance) that returns the outcome."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

_BUSY = (429,)


@dataclass(frozen=True)
class Job:
    """A body for ``/v1/completions``, and the text without other requests."""

    body: Mapping[str, Any]
    text: str


@dataclass(frozen=True)
class Server:
    """The address of a server, and its process."""

    host: str
    port: int
    pid: int

    @property
    def url(self) -> str:
        """The URL of the API."""
        return f"http://{self.host}:{self.port}"

    def metrics(self) -> dict[str, float]:
        """The metrics that have only the label of the model's name."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name.partition("{")[0]: float(value) for name, _, value in samples}


def whole(server: Server, job: Job, chance: random.Random) -> str:
    """Reads an answer that is not streamed."""
    response = httpx.post(f"{server.url}/v1/completions", json=dict(job.body), timeout=60)
    if response.status_code in _BUSY:
        return "busy"
    return _compared(response.json()["choices"][0]["text"], job)


def streamed(server: Server, job: Job, chance: random.Random) -> str:
    """Reads a stream to its end."""
    return _read(server, job, pause_s=0.0)


def slow(server: Server, job: Job, chance: random.Random) -> str:
    """Reads a stream slowly."""
    return _read(server, job, pause_s=chance.uniform(0.005, 0.03))


def leaving_stream(server: Server, job: Job, chance: random.Random) -> str:
    """Disconnects from a stream after some chunks."""
    return _read(server, job, pause_s=0.0, num_lines=chance.randrange(1, 8))


def leaving_whole(server: Server, job: Job, chance: random.Random) -> str:
    """Disconnects before an answer that is not streamed."""
    with _connection(server) as connection:
        connection.sendall(_request({**job.body, "max_tokens": 400, "ignore_eos": True}))
        time.sleep(chance.uniform(0, 0.1))
    return "left"


def cut_body(server: Server, job: Job, chance: random.Random) -> str:
    """Disconnects in the middle of its request body."""
    request = _request(job.body)
    with _connection(server) as connection:
        connection.sendall(request[: chance.randrange(1, len(request))])
        time.sleep(chance.uniform(0, 0.05))
    return "left"


def reset(server: Server, job: Job, chance: random.Random) -> str:
    """Resets its connection while the answer is sent."""
    connection = _connection(server)
    connection.sendall(_request({**job.body, "stream": True}))
    time.sleep(chance.uniform(0, 0.1))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    connection.close()
    return "reset"


def malformed(server: Server, job: Job, chance: random.Random) -> str:
    """Sends an invalid request, which must be refused."""
    data = json.dumps(dict(job.body)).encode()
    choices = [
        data[: chance.randrange(len(data))],
        chance.randbytes(chance.randrange(1, 400)),
        json.dumps({**job.body, "temperature": "warm"}).encode(),
        json.dumps({**job.body, "unknown": 1}).encode(),
        b"[" * 5000,
    ]
    headers = {"content-type": "application/json"}
    url = f"{server.url}/v1/completions"
    response = httpx.post(url, content=chance.choice(choices), headers=headers, timeout=60)
    return "refused" if response.status_code == 400 else f"failed: status {response.status_code}"


def oversized(server: Server, job: Job, chance: random.Random) -> str:
    """Sends a prompt longer than the context, or a body that is too large."""
    text = "fox " * chance.choice((3000, 2_000_000))
    try:
        response = httpx.post(f"{server.url}/v1/completions", json={**job.body, "prompt": text}, timeout=60)
    except httpx.TransportError:  # it closed the connection while the body was being sent
        return "refused"
    return "refused" if response.status_code in (400, 413) else f"failed: status {response.status_code}"


def asking(server: Server, job: Job, chance: random.Random) -> str:
    """Sends a request other than a generation."""
    path = chance.choice(("/health", "/metrics", "/v1/models", "/"))
    status = httpx.get(server.url + path, timeout=60).status_code
    return "answered" if status == 200 else f"failed: status {status}"


Client = Callable[[Server, Job, random.Random], str]
CLIENTS: dict[str, Client] = {
    client.__name__: client
    for client in (whole, streamed, slow, leaving_stream, leaving_whole, cut_body, reset, malformed, oversized, asking)
}


def _read(server: Server, job: Job, pause_s: float, num_lines: int | None = None) -> str:
    text, body = "", {**job.body, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        if response.status_code in _BUSY:
            return "busy"
        for number, line in enumerate(response.iter_lines()):
            if number == num_lines:
                return "left"
            if line == "data: [DONE]":
                return _compared(text, job)
            if line:
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                time.sleep(pause_s)
    return "left" if num_lines is not None else "failed: the stream ended early"


def _compared(text: str, job: Job) -> str:
    return "same text" if text == job.text else f"differs: {dict(job.body)} gave {text!r}, expected {job.text!r}"


def _connection(server: Server) -> socket.socket:
    return socket.create_connection((server.host, server.port), timeout=60)


def _request(body: Mapping[str, Any]) -> bytes:
    data = json.dumps(dict(body)).encode()
    lines = ("POST /v1/completions HTTP/1.1", "Host: soak", "Content-Type: application/json")
    return "\r\n".join((*lines, f"Content-Length: {len(data)}", "", "")).encode() + data
