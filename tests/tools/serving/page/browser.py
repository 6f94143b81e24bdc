"""A headless Chromium that a test looks into while a page runs, by its DevTools protocol."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

from tests.tools.serving.serving import wait_until

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --remote-debugging-port=0"


class Page:
    """A page that is open."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._number = connection, 0

    def evaluate(self, expression: str) -> Any:
        """The value of JavaScript in the page."""
        self._number += 1
        params = {"expression": expression, "returnByValue": True}
        self._connection.send(json.dumps({"id": self._number, "method": "Runtime.evaluate", "params": params}))
        while (answer := json.loads(self._connection.recv(30))).get("id") != self._number:
            pass
        return answer["result"]["result"].get("value")


@contextmanager
def opened(url: str, profile: Path) -> Iterator[Page]:
    assert BROWSER is not None
    command = [BROWSER, *QUIET.split(), f"--user-data-dir={profile}", url]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            port_file = profile / "DevToolsActivePort"
            wait_until(lambda: port_file.exists() and port_file.read_text().count("\n") > 0, 60)
            port = int(port_file.read_text().split()[0])
            pages: list[dict[str, Any]] = []

            def is_open() -> bool:
                listed = httpx.get(f"http://127.0.0.1:{port}/json", timeout=30).json()
                pages[:] = [page for page in listed if page["type"] == "page" and page["url"].startswith(url[:20])]
                return bool(pages)

            wait_until(is_open, 60)
            with connect(pages[0]["webSocketDebuggerUrl"], max_size=None) as connection:
                yield Page(connection)
        finally:
            process.terminate()
            process.wait(30)
