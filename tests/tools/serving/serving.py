"""A server in a thread of the test, on a free port."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from specrt.serving.app import create_app
from specrt.serving.server import Address, Server
from specrt.serving.service import Service


class Served:
    """A running server, and a client of it."""

    def __init__(self, url: str, server: Server) -> None:
        self.url, self.server = url, server
        self.client = httpx.Client(base_url=url, timeout=120)  # also on a busy machine

    @property
    def service(self) -> Service:
        assert self.server.service is not None
        return self.server.service

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def chat(self, content: str, **body: Any) -> Any:
        """The answer's object, after a check that it is one."""
        response = self.post("/v1/chat/completions", messages=user(content), **body)
        assert response.status_code == 200, response.text
        return response.json()

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def events(response: httpx.Response) -> list[Any]:
    """The chunks of a stream, after a check of how it ends."""
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


@contextmanager
def serving(
    load: Callable[[], Service], keys: Sequence[bytes] = (), is_ready: bool = True, cors_origins: Sequence[str] = ()
) -> Iterator[Served]:
    bound = Address(port=0).bind()
    server = Server(create_app(keys=keys, cors_origins=cors_origins), load, drain_timeout_s=20)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    url = Address().url(bound)
    server.start_loading()
    thread.start()
    served = Served(url, server)
    try:
        if is_ready:
            wait_until(lambda: served.client.get("/health").status_code == 200 if server.started else False)
        yield served
    finally:
        server.stop()
        thread.join(30)
        served.client.close()
        if server.service is not None:
            server.service.close()
        bound.close()
    assert not thread.is_alive()


def wait_until(holds: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
