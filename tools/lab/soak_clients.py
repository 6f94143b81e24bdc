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

from specrt.tools.lab.soak_jobs import CHAT, COMPLETIONS, Job, joined

TIMEOUT_S = 300  # without an answer, also on a machine that others use: then the server is stuck
_BUSY = (429,)
_JSON = {"content-type": "application/json"}


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
    response = httpx.post(server.url + job.path, json=dict(job.body), timeout=TIMEOUT_S)
    if response.status_code in _BUSY:
        return "busy"
    choice = response.json()["choices"][0]
    return _compared(joined([choice.get("message", choice)]), job)


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
        connection.sendall(_request(job.path, {**job.body, "max_tokens": 400, "ignore_eos": True}))
        time.sleep(chance.uniform(0, 0.1))
    return "left"


def cut_body(server: Server, job: Job, chance: random.Random) -> str:
    """Disconnects in the middle of its request body."""
    request = _request(job.path, job.body)
    with _connection(server) as connection:
        connection.sendall(request[: chance.randrange(1, len(request))])
        time.sleep(chance.uniform(0, 0.05))
    return "left"


def reset(server: Server, job: Job, chance: random.Random) -> str:
    """Resets its connection while the answer is sent."""
    connection = _connection(server)
    connection.sendall(_request(job.path, {**job.body, "stream": True}))
    time.sleep(chance.uniform(0, 0.1))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    connection.close()
    return "reset"


def malformed(server: Server, job: Job, chance: random.Random) -> str:
    """Sends an invalid request, which must be refused."""
    data = json.dumps(dict(job.body)).encode()
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    prompt: dict[str, Any] = {"prompt": "x"}
    choices: list[tuple[str, bytes]] = [
        (job.path, data[: chance.randrange(len(data))]),
        (job.path, chance.randbytes(chance.randrange(1, 400))),
        (job.path, json.dumps({**job.body, "temperature": "warm"}).encode()),
        (job.path, json.dumps({**job.body, "unknown": 1}).encode()),
        (job.path, b"[" * 5000),
        (CHAT, json.dumps({"messages": [{"role": "user"}]}).encode()),
        (CHAT, json.dumps({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "x"}]}).encode()),
        (COMPLETIONS, json.dumps({**prompt, "structured_outputs": {"regex": "("}}).encode()),
        (COMPLETIONS, json.dumps({**prompt, "response_format": wrong}).encode()),
    ]
    path, content = chance.choice(choices)
    response = httpx.post(server.url + path, content=content, headers=_JSON, timeout=TIMEOUT_S)
    return "refused" if response.status_code == 400 else f"failed: status {response.status_code}"


def oversized(server: Server, job: Job, chance: random.Random) -> str:
    """Sends a prompt longer than the context, or a body that is too large."""
    text = "fox " * chance.choice((20_000, 2_000_000))
    message = {"role": "user", "content": text}
    body = {"prompt": text} if job.path == COMPLETIONS else {"messages": [message]}
    try:
        response = httpx.post(server.url + job.path, json=body, timeout=TIMEOUT_S)
    except httpx.TransportError:  # it closed the connection while the body was being sent
        return "refused"
    return "refused" if response.status_code in (400, 413) else f"failed: status {response.status_code}"


def asking(server: Server, job: Job, chance: random.Random) -> str:
    """Sends a request other than a generation."""
    path = chance.choice(("/health", "/metrics", "/v1/models", "/"))
    status = httpx.get(server.url + path, timeout=TIMEOUT_S).status_code
    return "answered" if status == 200 else f"failed: status {status}"


Client = Callable[[Server, Job, random.Random], str]
CLIENTS: dict[str, Client] = {
    client.__name__: client
    for client in (whole, streamed, slow, leaving_stream, leaving_whole, cut_body, reset, malformed, oversized, asking)
}


def _read(server: Server, job: Job, pause_s: float, num_lines: int | None = None) -> str:
    deltas: list[Mapping[str, Any]] = []
    body = {**job.body, "stream": True}
    with httpx.stream("POST", server.url + job.path, json=body, timeout=TIMEOUT_S) as response:
        if response.status_code in _BUSY:
            return "busy"
        for number, line in enumerate(response.iter_lines()):
            if number == num_lines:
                return "left"
            if line == "data: [DONE]":
                return _compared(joined(deltas), job)
            if line:
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                deltas.append(choice.get("delta", choice))
                time.sleep(pause_s)
    return "left" if num_lines is not None else "failed: the stream ended early"


def _compared(text: str, job: Job) -> str:
    if text != job.text:
        return f"differs: {dict(job.body)} gave {text!r}, expected {job.text!r}"
    return "same text" if job.path == COMPLETIONS else "same structured text"


def _connection(server: Server) -> socket.socket:
    return socket.create_connection((server.host, server.port), timeout=TIMEOUT_S)


def _request(path: str, body: Mapping[str, Any]) -> bytes:
    data = json.dumps(dict(body)).encode()
    lines = (f"POST {path} HTTP/1.1", "Host: soak", "Content-Type: application/json")
    return "\r\n".join((*lines, f"Content-Length: {len(data)}", "", "")).encode() + data
