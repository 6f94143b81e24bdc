"""What ``specrt bench --url`` does with its options."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from specrt.engines.errors import UsageError
from specrt.engines.storage.files import write_text_file
from specrt.tools.bench.command import RUNS, TOKENS, chosen_prompts
from specrt.tools.bench.remote.clients import Client, HttpClient, LibraryClient
from specrt.tools.bench.remote.run import BATCHES_PER_CLIENT, Measured, compared, measure
from specrt.tools.prompting.textfiles import read_text
from specrt.tools.terminal.progress import shown_steps


def run_urls(
    bundle: Path | None,
    urls: Sequence[str],
    clients: str,
    model: str | None,
    api_key_file: Path | None,
    prompts: Path | None,
    categories: str | None,
    prompts_per_category: int | None,
    max_new_tokens: int | None,
    num_runs: int | None,
    temperature: float,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """Measure the servers, and with a bundle the library too. Raises ``SpecrtError``."""
    counts = _counts(clients)
    key = read_text(api_key_file).split()[0] if api_key_file is not None else None
    chosen = chosen_prompts(prompts, categories, prompts_per_category)
    tokens, runs = max_new_tokens or TOKENS, num_runs or RUNS
    servers: list[Client] = [HttpClient(url, model, key) for url in urls]
    reports: list[dict[str, Any]] = []
    with _library(bundle, threads) as library:
        for count in counts:
            asked = [*library, *servers] if count == 1 else servers
            size = 1 if count == 1 else count * BATCHES_PER_CLIENT
            with shown_steps(len(asked) * runs * -(-len(chosen) // size)) as progress:
                found = measure(asked, chosen, count, runs, tokens, temperature, progress)
            reports.append(_report(found))
            _print(found, reports[-1])
    if json_file is not None:
        settings = {"max_new_tokens": tokens, "num_runs": runs, "temperature": temperature, "prompts": len(chosen)}
        write_text_file(json_file, json.dumps({"settings": settings, "measured": reports}, indent=1) + "\n")


def _counts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= 256 for part in parts):
        raise UsageError(f"--clients: got {text!r}, expected numbers from 1 to 256 such as 1,4")
    return [int(part) for part in parts]


@contextmanager
def _library(bundle: Path | None, threads: int | None) -> Iterator[list[Client]]:
    if bundle is None:
        yield []
        return
    import specrt

    with specrt.load(bundle, threads=threads) as runtime:
        yield [LibraryClient(runtime)]


def _report(found: Sequence[Measured]) -> dict[str, Any]:
    first, *others = found
    return {
        "servers": [measured.as_dict() for measured in found],
        "ratios": [{"of": other.name, "to": first.name, **compared(first, other)} for other in others],
    }


def _print(found: Sequence[Measured], report: dict[str, Any]) -> None:
    table = Table(title=f"{found[0].num_clients} clients at a time: mean (95 % interval)", title_justify="left")
    for heading in ("server", "first token, ms", "ms a token", "tokens/s", "times the first: TTFT", "TPOT", "tokens/s"):
        table.add_column(heading)
    ratios = [None, *report["ratios"]]
    for server, ratio in zip(report["servers"], ratios, strict=True):
        cells = [_cell(server[name], ".1f") for name in ("ttft_ms", "tpot_ms", "tokens_per_s")]
        cells += ["" if ratio is None else _cell(ratio[name], ".3f") for name in ("ttft", "tpot", "throughput")]
        table.add_row(server["server"], *cells)
    console = Console()
    console.print(table, markup=False, width=None if console.is_terminal else 160)
    for ratio in report["ratios"]:
        click.echo(f"{ratio['of']}: {ratio['same_texts']} of {len(found[0].timings)} texts as of {ratio['to']}")


def _cell(value: dict[str, Any], form: str) -> str:
    if value["mean"] is None:
        return "-"
    between = value["interval"]
    return f"{value['mean']:{form}}" + ("" if between is None else f" ({between[0]:{form}} to {between[1]:{form}})")
