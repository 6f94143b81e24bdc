"""A model hub on this machine, with one repository."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub with one repository. ``answers`` has the content or the status of each file name."""

    answers: dict[str, Any] = {}  # noqa: RUF012
    commit = "0" * 40

    def do_HEAD(self) -> None:
        name = self.path.split("/")[-1]
        answer = self.answers.get(name, 404)
        status = answer if isinstance(answer, int) else 200
        self.send_response(status)
        self.send_header("X-Repo-Commit", self.commit)
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        if status == 200:
            self.send_header("ETag", f'"{name}"')  # the cache stores one file for each
        self.send_header("Content-Length", str(len(answer) if isinstance(answer, bytes) else 0))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        answer = self.answers.get(self.path.split("/")[-1], b"")
        if isinstance(answer, bytes):
            self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def local_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[dict[str, Any]]:
    """Replace the real hub by this one, with the empty folder ``cache``; yields its answers."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    constants = huggingface_hub.constants
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(Hub, "answers", {})
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between its retries
    yield Hub.answers
    server.shutdown()
    server.server_close()
