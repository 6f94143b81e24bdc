"""``python -m specrt.tools.lab.http_latency BUNDLE``: what HTTP adds to the library, and other servers in the same run.

The library, ``specrt serve``, llama.cpp's server and ONNX Runtime GenAI are processes of their own, each with all
threads. One of them works at a time: they take turns on the same prompts, in an order that alternates. GenAI has no
server: it runs in process and answers one request after another, also for several clients. Each request begins with
another number, so that no cache of prefixes holds it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from specrt.engines.errors import SpecrtError
from specrt.tools.bench.remote.clients import Client
from specrt.tools.bench.remote.run import Measured, compared, measure
from specrt.tools.lab.http_peers import NUM_SLOTS, Peer, opened
from specrt.tools.prompting.prompts import Prompt
from specrt.tools.terminal.failure import Tool
from specrt.tools.terminal.process import run_process
from specrt.tools.terminal.progress import shown_steps

PAUSE_S = 0.1  # until the threads of the process before sleep
MAX_NEW_TOKENS, QUICK_TOKENS = 64, 24
NUM_PAIRS, NUM_QUICK_PAIRS = 24, 6  # of one request to the library and one to the server
NUM_OTHERS, NUM_QUICK_OTHERS = 8, 4  # requests to each of all, for each number of clients
_TEXTS = (
    "Write a Python function that reverses a string, and explain it.",
    "Why is the sky blue? Answer in a few sentences.",
    "Write a short story about a fox that crosses a river.",
    "List five vegetables, with a sentence about each.",
)


def prompts_of(num: int, first: int) -> list[Prompt]:
    """Prompts that are different from their first characters on; numbers from ``first`` on."""
    return [Prompt(f"p{n}", f"{n}. {_TEXTS[n % len(_TEXTS)]}") for n in range(first, first + num)]


def rows_of(found: Sequence[Measured], against: int = 0) -> list[str]:
    """Markdown rows: medians, and ratios to the row ``against`` with their 95 % intervals."""
    rows = []
    for measured in found:
        figures = measured.as_dict()
        cells = [measured.name, str(measured.num_clients), str(figures["answers"])]
        cells += [_median(figures[name]) for name in ("ttft_ms", "tpot_ms", "tokens_per_s")]
        is_first = measured is found[against]
        ratios = {} if is_first else compared(found[against], measured)
        cells += ["" if is_first else _ratio(ratios[name]) for name in ("ttft", "throughput")]
        cells.append("" if is_first else f"{ratios['same_texts']}")
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _median(value: dict[str, Any]) -> str:
    return "-" if value["median"] is None else f"{value['median']:.1f}"


def _ratio(value: dict[str, Any]) -> str:
    low_high = value["interval"]
    return f"{value['mean']:.3f}" + ("" if low_high is None else f" ({low_high[0]:.3f} to {low_high[1]:.3f})")


HEAD = (
    "| | clients | n | first token, ms | ms a token | tokens/s | TTFT, times the first | tokens/s | same texts |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def started(stack: ExitStack, peers: Sequence[Peer]) -> list[Client]:
    """The clients of the processes that start; the others are named, with the reason. The first two must start."""
    clients: list[Client] = []
    for number, peer in enumerate(peers):
        try:
            client = stack.enter_context(opened(peer))
        except SpecrtError as error:
            if number < 2:
                raise
            click.echo(f"left out: {error}", err=True)
            continue
        client.name = peer.kind
        clients.append(client)
    return clients


@click.command(cls=Tool)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--gguf", type=click.Path(path_type=Path), help="The model for llama-server.  [default: the source]")
@click.option("--threads", type=click.IntRange(1), default=os.cpu_count(), show_default=True, help="Of each process.")
@click.option("--quick", is_flag=True, help="A trial in less than two minutes.")
@click.option("--only-ours", is_flag=True, help="Only the library and specrt serve.")
def main(bundle: Path, gguf: Path | None, threads: int, quick: bool, only_ours: bool) -> None:
    """Measure the library and servers of BUNDLE in turns, and print Markdown rows."""
    source = str(gguf) if gguf else None
    kinds = ["library", "server", *([] if only_ours else ["llama-server", "genai"])]
    tokens = QUICK_TOKENS if quick else MAX_NEW_TOKENS
    num_pairs, num_others = (NUM_QUICK_PAIRS, NUM_QUICK_OTHERS) if quick else (NUM_PAIRS, NUM_OTHERS)
    with ExitStack() as stack:
        clients = started(stack, [Peer(kind, str(bundle), threads, source) for kind in kinds])
        library, server, *others = clients
        runs = [([library, server], 1, num_pairs)]
        runs += [([server, *others], count, num_others * count) for count in (1, NUM_SLOTS) if others]
        found, first = list[list[Measured]](), 1000
        for asked, count, num in runs:
            with shown_steps(len(asked) * num) as progress:
                found.append(measure(asked, prompts_of(num, first), count, 1, tokens, 0.0, progress, PAUSE_S))
            first += num
    click.echo(f"{bundle.resolve().name}, {threads} threads, at most {tokens} tokens, greedy\n\n{HEAD}")
    click.echo("\n".join(row for measured in found for row in rows_of(measured)))


if __name__ == "__main__":
    run_process(lambda: main)
