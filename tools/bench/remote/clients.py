"""What is asked: a server of OpenAI's API by a stream of chat completions, or the library in this process."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from specrt.engines.errors import SpecrtError, UsageError
from specrt.runtime.runtime import Runtime
from specrt.tools.prompting.prompts import Prompt

TIMEOUT_S = 600


@dataclass(frozen=True)
class Timing:
    """One answer, from the request on; s. ``first_s`` is when its first text came, ``last_s`` its last."""

    first_s: float
    last_s: float
    num_tokens: int
    text: str

    @property
    def per_token_s(self) -> float | None:
        """The time after the first token, for each further one (TPOT)."""
        return (self.last_s - self.first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None


class Client(Protocol):
    """Something that answers. ``name`` is for people."""

    name: str

    def ask(self, prompt: Prompt, max_new_tokens: int, temperature: float) -> Timing: ...


class HttpClient:
    """A server at ``url``, such as ``http://127.0.0.1:8000/v1``. Raises ``UsageError`` for another kind of address.

    Each thread keeps its connection, as OpenAI's client does.
    """

    def __init__(self, url: str, model: str | None = None, key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--url: got {url!r}, expected an address such as http://127.0.0.1:8000/v1")
        self.name, self._parts, self._model = url, parts, model
        self._kept = threading.local()
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}

    def ask(self, prompt: Prompt, max_new_tokens: int, temperature: float) -> Timing:
        """Stream an answer. Raises ``SpecrtError`` where the server gives none."""
        body: dict[str, Any] = {
            "messages": prompt.messages,
            "max_tokens": max_new_tokens,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._model is not None:
            body["model"] = self._model
        path, data = self._parts.path.rstrip("/") + "/chat/completions", json.dumps(body)
        connection = self._connection()
        try:
            try:
                started = time.perf_counter()
                connection.request("POST", path, data, self._headers)
                response = connection.getresponse()
            except ConnectionError:  # the server has closed what was kept
                connection.close()
                started = time.perf_counter()
                connection.request("POST", path, data, self._headers)
                response = connection.getresponse()
            return self._read(response, started)
        except BaseException as error:
            connection.close()  # it may be in the middle of an answer
            if not isinstance(error, (OSError, http.client.HTTPException)):
                raise
            raise SpecrtError(f"{self.name}: no answer ({type(error).__name__}: {error}); is it running?") from error

    def _connection(self) -> http.client.HTTPConnection:
        """This thread's connection, open or not."""
        if not hasattr(self._kept, "connection"):
            connect = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
            self._kept.connection = connect(str(self._parts.hostname), self._parts.port, timeout=TIMEOUT_S)
        kept: http.client.HTTPConnection = self._kept.connection
        return kept

    def _read(self, response: http.client.HTTPResponse, started: float) -> Timing:
        if response.status != 200:
            reason = " ".join(response.read(2000).decode(errors="replace").split())
            raise SpecrtError(f"{self.name}: status {response.status}: {reason}")
        text, first, last, num_tokens, num_chunks = "", None, started, None, 0
        for chunk in _events(response):
            if "error" in chunk:
                raise SpecrtError(f"{self.name}: {chunk['error']}")
            if usage := chunk.get("usage"):
                num_tokens = int(usage["completion_tokens"])
            delta = chunk["choices"][0].get("delta", {}) if chunk.get("choices") else {}
            if piece := (delta.get("content") or delta.get("reasoning_content") or ""):
                last = time.perf_counter()
                first = last if first is None else first
                text, num_chunks = text + piece, num_chunks + 1
        if first is None:
            raise SpecrtError(f"{self.name}: the answer has no text")
        return Timing(first - started, last - started, num_chunks if num_tokens is None else num_tokens, text)


class LibraryClient:
    """The library, as what a server is compared with."""

    name = "library"

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def ask(self, prompt: Prompt, max_new_tokens: int, temperature: float) -> Timing:
        """Generate in this process."""
        started = time.perf_counter()
        stream = self._runtime.stream(prompt.messages, max_new_tokens=max_new_tokens, temperature=temperature)
        times = [time.perf_counter() for _ in stream]
        if not times:
            raise SpecrtError("library: the answer has no text")
        result = stream.result
        return Timing(times[0] - started, times[-1] - started, len(result.token_ids), result.text)


def _events(response: http.client.HTTPResponse) -> Iterator[Mapping[str, Any]]:
    for line in response:
        data = line.strip().removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield json.loads(data)
