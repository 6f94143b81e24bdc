"""``python -m specrt.tools.lab.http_latency BUNDLE``: what HTTP adds to the library, and other servers in the same run.

The library, ``specrt serve``, llama.cpp's server and ONNX Runtime GenAI are processes of their own, each with all
threads. One of them works at a time: they take turns on the same prompts, in an order that alternates. GenAI has no
server: it runs in process and answers one request after another, also for several clients. Each request begins with
another number, so that no cache of prefixes holds it. ``--int4`` adds a server of a 4-bit bundle, with which
llama-server is compared; without it that is compared with the first server. Texts are compared only among equal
weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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
NUM_PAIRS, NUM_QUICK_PAIRS = 64, 6  # of one request to the library and one to the server
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


@dataclass(frozen=True)
class Turns:
    """What takes turns: ``num`` requests to each of ``peers``, ``num_clients`` at a time.

    ``ours`` is what a peer is compared with, by its name; the others are compared with nothing.
    """

    peers: Sequence[Peer]
    ours: Mapping[str, Peer]
    num_clients: int
    num: int

    def rows(self, found: Sequence[Measured]) -> list[str]:
        """Markdown rows: medians, and the ratios to ``ours`` with their 95 % intervals."""
        by_name = {measured.name: measured for measured in found}
        return [self._row(peer, by_name) for peer in self.peers if peer.name in by_name]

    def _row(self, peer: Peer, found: Mapping[str, Measured]) -> str:
        figures, ours = found[peer.name].as_dict(), self.ours.get(peer.name)
        cells = [peer.name, str(self.num_clients), str(figures["answers"])]
        cells += [_median(figures[name]) for name in ("ttft_ms", "tpot_ms", "tokens_per_s")]
        if ours is None:
            return f"| {' | '.join([*cells, '', '', '', ''])} |"
        ratios = compared(found[ours.name], found[peer.name])
        cells += [ours.name, *(_ratio(ratios[name]) for name in ("ttft", "throughput"))]
        cells.append(str(ratios["same_texts"]) if ours.weights == peer.weights else "")
        return f"| {' | '.join(cells)} |"


def _median(value: Mapping[str, Any]) -> str:
    return "-" if value["median"] is None else f"{value['median']:.1f}"


def _ratio(value: Mapping[str, Any]) -> str:
    low_high = value["interval"]
    return f"{value['mean']:.3f}" + ("" if low_high is None else f" ({low_high[0]:.3f} to {low_high[1]:.3f})")


HEAD = (
    "| | clients | answers | first token, ms | ms a token | tokens/s | of | first token, times | tokens/s, times "
    "| same texts |\n|---|---|---|---|---|---|---|---|---|---|"
)


def turns_of(bundle: str, int4: str | None, gguf: str | None, threads: int, num_pairs: int, num: int) -> list[Turns]:
    """Library and server, of each bundle; then our servers and those of others, with 1 and ``NUM_SLOTS`` clients.

    ``gguf`` "" leaves the others out; None is the source of the bundle.
    """
    library, server = (Peer(kind, bundle, threads) for kind in ("library", "server"))
    all_turns = [Turns([library, server], {server.name: library}, 1, num_pairs)]
    servers = [server]
    if int4 is not None:
        library4, server4 = (Peer(kind, int4, threads, label=", int4") for kind in ("library", "server"))
        all_turns.append(Turns([library4, server4], {server4.name: library4}, 1, num_pairs))
        servers.append(server4)
    if gguf != "":
        llama, genai = Peer("llama-server", bundle, threads, gguf), Peer("genai", bundle, threads)
        ours = {llama.name: servers[-1], genai.name: server}
        all_turns += [Turns([*servers, llama, genai], ours, count, num * count) for count in (1, NUM_SLOTS)]
    return all_turns


def started(stack: ExitStack, peers: Iterable[Peer]) -> dict[str, Client]:
    """The clients of the processes that start, by name; others' are named, with the reason. Ours must start."""
    clients: dict[str, Client] = {}
    for peer in dict.fromkeys(peers):
        try:
            client = stack.enter_context(opened(peer))
        except SpecrtError as error:
            if peer.kind in ("library", "server"):
                raise
            click.echo(f"left out: {error}", err=True)
            continue
        client.name = peer.name
        clients[peer.name] = client
    return clients


@click.command(cls=Tool)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--int4", type=click.Path(path_type=Path), help="A bundle of the same model with 4-bit weights.")
@click.option("--gguf", type=click.Path(path_type=Path), help="The model for llama-server.  [default: the source]")
@click.option("--threads", type=click.IntRange(1), default=os.cpu_count(), show_default=True, help="Of each process.")
@click.option("--quick", is_flag=True, help="A trial in less than two minutes.")
@click.option("--only-ours", is_flag=True, help="Only the library and specrt serve.")
def main(bundle: Path, int4: Path | None, gguf: Path | None, threads: int, quick: bool, only_ours: bool) -> None:
    """Measure the library and servers of BUNDLE in turns, and print Markdown rows."""
    source = "" if only_ours else str(gguf) if gguf else None
    tokens = QUICK_TOKENS if quick else MAX_NEW_TOKENS
    num_pairs, num_others = (NUM_QUICK_PAIRS, NUM_QUICK_OTHERS) if quick else (NUM_PAIRS, NUM_OTHERS)
    all_turns = turns_of(str(bundle), str(int4) if int4 else None, source, threads, num_pairs, num_others)
    rows, first = list[str](), 1000
    with ExitStack() as stack:
        clients = started(stack, (peer for turns in all_turns for peer in turns.peers))
        for turns in all_turns:
            asked = [clients[peer.name] for peer in turns.peers if peer.name in clients]
            prompts = prompts_of(turns.num, first)
            with shown_steps(len(asked) * turns.num) as progress:
                found = measure(asked, prompts, turns.num_clients, 1, tokens, 0.0, progress, PAUSE_S)
            rows += turns.rows(found)
            first += turns.num
    click.echo(f"{bundle.resolve().name}, {threads} threads, at most {tokens} tokens, greedy\n\n{HEAD}")
    click.echo("\n".join(rows))


if __name__ == "__main__":
    run_process(lambda: main)
