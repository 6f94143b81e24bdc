"""Servers that take turns on the same prompts: time to first token, time per token and throughput, with intervals."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specrt.engines.progress import SILENT, Progress
from specrt.tools.bench.intervals import Interval, t975
from specrt.tools.bench.remote.clients import Client, Timing
from specrt.tools.prompting.prompts import Prompt

BATCHES_PER_CLIENT = 2  # prompts that a server gets in its turn, for each client

WARM_UP = Prompt("warm-up", "Hello. How are you?")


@dataclass
class Measured:
    """Answers of one server with ``num_clients`` clients, by run and prompt; tokens/s of each turn."""

    name: str
    num_clients: int
    timings: list[Timing] = field(default_factory=list)
    throughputs: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Means with their 95 % intervals; times in ms."""
        per_token = [timing.per_token_s for timing in self.timings if timing.per_token_s is not None]
        return {
            "server": self.name,
            "clients": self.num_clients,
            "answers": len(self.timings),
            "tokens": sum(timing.num_tokens for timing in self.timings),
            "ttft_ms": _mean([1e3 * timing.first_s for timing in self.timings]),
            "tpot_ms": _mean([1e3 * seconds for seconds in per_token]),
            "tokens_per_s": _mean(self.throughputs),
        }


def measure(
    clients: Sequence[Client],
    prompts: Sequence[Prompt],
    num_clients: int,
    num_runs: int,
    max_new_tokens: int,
    temperature: float,
    progress: Progress = SILENT,
    pause_s: float = 0.0,
) -> list[Measured]:
    """Ask each of ``clients`` all prompts, ``num_clients`` at a time. They take turns, after an answer to warm up.

    There is a pause of ``pause_s`` before each turn.
    """
    found = [Measured(client.name, num_clients) for client in clients]
    for client in clients:
        client.ask(WARM_UP, 2, temperature)  # another prompt, since servers keep the caches of those that they had
    size = num_clients * BATCHES_PER_CLIENT if num_clients > 1 else 1
    with ThreadPoolExecutor(num_clients) as pool:
        for number in range(num_runs):
            for start in range(0, len(prompts), size):
                part = prompts[start : start + size]
                turns = list(zip(clients, found, strict=True))
                for client, measured in turns if (start // size + number) % 2 == 0 else reversed(turns):
                    time.sleep(pause_s)
                    _take_turn(pool, client, measured, part, max_new_tokens, temperature)
                    progress.step(f"{client.name}, {num_clients} clients")
    return found


def _take_turn(
    pool: ThreadPoolExecutor,
    client: Client,
    measured: Measured,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    temperature: float,
) -> None:
    started = time.perf_counter()
    timings = list(pool.map(lambda prompt: client.ask(prompt, max_new_tokens, temperature), prompts))
    seconds = time.perf_counter() - started
    measured.timings += timings
    measured.throughputs.append(sum(timing.num_tokens for timing in timings) / seconds)


def compared(ours: Measured, theirs: Measured) -> dict[str, Any]:
    """Ratios of ``theirs`` over ``ours``, prompt by prompt, as geometric means; how many texts are the same."""
    pairs = list(zip(ours.timings, theirs.timings, strict=True))
    both = [(a.per_token_s, b.per_token_s) for a, b in pairs]
    return {
        "ttft": _ratio([(a.first_s, b.first_s) for a, b in pairs]),
        "tpot": _ratio([(a, b) for a, b in both if a and b]),
        "throughput": _ratio(list(zip(ours.throughputs, theirs.throughputs, strict=True))),
        "same_texts": sum(a.text == b.text for a, b in pairs),
    }


def _ratio(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    logs = np.log([[b / a] for a, b in pairs]).ravel() if pairs else np.zeros(0)
    mean, interval = _center(logs)
    low_high = None if interval is None else tuple(float(np.exp(end)) for end in interval)
    return {"mean": None if mean is None else float(np.exp(mean)), "interval": low_high}


def _mean(values: Sequence[float]) -> dict[str, Any]:
    mean, interval = _center(np.array(values))
    return {"mean": mean, "interval": interval, "median": float(np.median(values)) if len(values) else None}


def _center(values: Any) -> tuple[float | None, Interval | None]:
    """(mean, its 95 % interval by Student's t); None where there are too few values."""
    num = len(values)
    if num == 0:
        return None, None
    mean = float(np.mean(values))
    if num < 2:
        return mean, None
    half = t975(num - 1) * float(np.std(values, ddof=1)) / num**0.5
    return mean, (mean - half, mean + half)
