"""A server under clients that behave badly: ``python -m specrt.tools.lab.soak BUNDLE --minutes 30``.

Eight clients send random requests. Some disconnect, send invalid requests, read slowly or exceed limits. At the end no
slot may be lost, every completely read text must equal that of a run without other requests, and the memory must not
have grown.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from specrt.engines.errors import SpecrtError
from specrt.tools.lab.soak_clients import CLIENTS, Server
from specrt.tools.lab.soak_jobs import Job, jobs_of, with_tools
from specrt.tools.terminal.failure import Tool

MAX_CONCURRENCY, QUEUE_SIZE = 4, 16
MAX_GROWTH = 0.02


@dataclass
class Report:
    """The result of a run. ``rss_mb`` are samples over time, ``problems`` are errors."""

    outcomes: Counter[str] = field(default_factory=Counter)
    rss_mb: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    exit_code: int | None = None
    idle_slots: int | None = None

    @property
    def fifths_mb(self) -> list[float]:
        """The means of the five fifths of the samples, or all samples if there are fewer."""
        num = min(5, len(self.rss_mb))
        ends = [part * len(self.rss_mb) // num for part in range(num + 1)]
        return [sum(self.rss_mb[a:b]) / (b - a) for a, b in pairwise(ends)]

    @property
    def growth(self) -> float:
        """The largest of the last three fifths over the second. The first one is warm-up."""
        fifths = self.fifths_mb
        return max(fifths[2:], default=fifths[-1]) / fifths[min(1, len(fifths) - 1)] - 1

    @property
    def whole_growth(self) -> float:
        """The largest sample over the first: with the warm-up."""
        return max(self.rss_mb) / self.rss_mb[0] - 1

    def as_dict(self) -> dict[str, Any]:
        """As printed, and as quoted in docs/serving.md. ``rss_mb``: the first, the largest, means of the fifths."""
        return {
            "outcomes": dict(sorted(self.outcomes.items())),
            "rss_mb": [round(mb, 1) for mb in (self.rss_mb[0], max(self.rss_mb), *self.fifths_mb)],
            "rss_growth": round(self.growth, 4),
            "rss_growth_from_first_sample": round(self.whole_growth, 4),
            "idle_slots": self.idle_slots,
            "exit_code": self.exit_code,
            "problems": self.problems[:20],
        }


def soak(bundle: Path, jobs: Sequence[Job], seconds: float, num_clients: int = 8, seed: int = 0) -> Report:
    """Run the clients against a server in a separate process."""
    report = Report()
    with _served(bundle, report) as server:
        end = time.monotonic() + seconds
        lock = threading.Lock()

        def act(number: int) -> None:
            chance = random.Random(1000 * seed + number)
            while time.monotonic() < end:
                name = chance.choice(sorted(CLIENTS))
                try:
                    outcome = CLIENTS[name](server, chance.choice(jobs), chance)
                except Exception as error:  # a failing client is a finding
                    outcome = f"failed: {type(error).__name__}: {error}"
                with lock:
                    report.outcomes[f"{name}: {outcome.partition(':')[0]}"] += 1
                    if outcome.startswith(("failed", "differs")):
                        report.problems.append(f"{name}: {outcome}")

        threads = [threading.Thread(target=act, args=(number,)) for number in range(num_clients)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            report.rss_mb.append(_rss_mb(server.pid))
            time.sleep(min(1.0, max(0.05, seconds / 100)))
        _check_slots(server, report)
    if report.exit_code != 0:
        report.problems.append(f"the server ended with {report.exit_code} after SIGTERM")
    return report


@contextmanager
def _served(bundle: Path, report: Report) -> Iterator[Server]:
    command = [sys.executable, "-m", "specrt.tools.cli", "serve", str(bundle), "--port", "0", "--reproducible"]
    command += ["--max-concurrency", str(MAX_CONCURRENCY), "--queue-size", str(QUEUE_SIZE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"http://([\d.]+):(\d+)/v1", process.stdout.readline())
            if found is None:
                raise SpecrtError("soak: the server did not start")
            yield Server(found[1], int(found[2]), process.pid)
            process.send_signal(signal.SIGTERM)
            report.exit_code = process.wait(60)
        finally:
            if process.poll() is None:
                process.kill()


def _check_slots(server: Server, report: Report) -> None:
    """All slots must be idle soon after the last client."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        metrics = server.metrics()
        report.idle_slots = int(metrics["vllm:num_idle_slots"])
        if report.idle_slots == MAX_CONCURRENCY and not metrics["vllm:num_requests_running"]:
            return
        time.sleep(0.1)
    report.problems.append(f"{report.idle_slots} of {MAX_CONCURRENCY} slots are idle at the end")


def _rss_mb(pid: int) -> float:
    fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@click.command(cls=Tool)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--minutes", type=float, default=30.0, show_default=True)
@click.option("--clients", type=int, default=8, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def main(bundle: Path, minutes: float, clients: int, seed: int) -> None:
    """Soak a server of BUNDLE, and print what happened as JSON."""
    with tempfile.TemporaryDirectory(prefix="soak-", dir=bundle.resolve().parent) as folder:  # for hard links
        served = with_tools(bundle, Path(folder) / "bundle")
        report = soak(served, jobs_of(served), 60 * minutes, clients, seed)
    if report.growth > MAX_GROWTH:
        report.problems.append(f"the resident memory grew by {report.growth:.1%}")
    click.echo(json.dumps(report.as_dict(), indent=1))
    if report.problems:
        raise SpecrtError(f"soak: {len(report.problems)} problems, the first: {report.problems[0]}")


if __name__ == "__main__":
    main()
