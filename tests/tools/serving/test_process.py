"""``specrt serve`` as a process: what it prints, its log, and signals while a request runs."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.tools.serving.serving import user, wait_until

LONG = {"prompt": "a secret text", "max_tokens": 400, "n": 64, "ignore_eos": True}


class Process:
    """A server process at ``url``."""

    def __init__(self, process: subprocess.Popen[str], line: str) -> None:
        self.process, self.line = process, line
        found = re.fullmatch(r"specrt: serving (\S+) at (http://127\.0\.0\.1:\d+)/v1 \(\2 is a chat(, \w+)?\)\n", line)
        assert found is not None, line
        self.name, self.url = found[1], found[2]

    def running(self) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        return float(re.findall(r"^tiny_num_requests_running\{.*\} (\S+)$", text, re.MULTILINE)[0])

    def end(self) -> tuple[int, str]:
        """(exit code, standard error)"""
        rest, errors = self.process.communicate(timeout=60)
        assert rest == "", "one line is printed"
        return self.process.returncode, errors


@contextmanager
def process_of(bundle: Path, *options: str) -> Iterator[Process]:
    command = [sys.executable, "-m", "specrt.tools.cli", "serve", str(bundle), "--port", "0", "--threads", "1"]
    command += ["--metrics-prefix", "tiny_", *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            yield Process(process, process.stdout.readline())
        finally:
            process.kill()


def ask(url: str) -> None:
    try:
        httpx.post(f"{url}/v1/completions", json=LONG, timeout=60)
    except httpx.HTTPError:
        pass  # it is cut off


@pytest.mark.parametrize(
    ("drain_timeout", "num_signals", "code", "last"),
    [
        ("60", 2, 143, "specrt: terminated"),
        ("0.2", 1, 8, "specrt: error: requests were cut off: they did not end within 0.2 s; raise --drain-timeout"),
    ],
)
def test_signals_while_a_request_runs(
    tiny_bundle: Path, drain_timeout: str, num_signals: int, code: int, last: str
) -> None:
    """The first one drains, for ``--drain-timeout``; the second one ends the process at once."""
    with process_of(tiny_bundle, "--served-model-name", "tiny", "--drain-timeout", drain_timeout) as server:
        assert server.name == "tiny"
        body = {"messages": user("a secret text"), "max_tokens": 2}
        assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).status_code == 200
        asking = threading.Thread(target=ask, args=(server.url,))
        asking.start()
        wait_until(lambda: server.running() > 0)
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        if num_signals == 2:
            wait_until(lambda: httpx.get(f"{server.url}/health", timeout=30).status_code == 503)
            assert server.process.poll() is None, "it waits for what runs"
            server.process.send_signal(signal.SIGTERM)
        ended, errors = server.end()
        asking.join()
        assert time.monotonic() - started < 30
    assert (ended, errors.splitlines()[-1]) == (code, last)
    assert "POST /v1/chat/completions 200" in errors and "completion_tokens=2" in errors and "secret" not in errors
    assert "load" in errors.splitlines()[0], "the progress comes first"
