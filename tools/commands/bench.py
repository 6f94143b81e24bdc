"""``specrt bench``: methods measured on the same prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specrt.tools.prompting.options import MAX_THREADS
from specrt.tools.terminal.outputs import OUTPUT_FILE as OUTPUT

FILE = click.Path(path_type=Path)
BASELINES = "Of eager, eager-bf16, eager-compiled, assisted, assisted-bf16, lookup, llama.cpp, genai, plain."


@click.command()
@click.argument("bundle", type=FILE)
@click.option("--baseline", default="eager,plain", show_default=True, help=BASELINES)
@click.option("--categories", help="Some of our twelve kinds of prompts, by comma.  [default: all]")
@click.option("--prompts", "file", type=FILE, help="Prompts of your own: one a line, or JSON lines.  [default: ours]")
@click.option("--prompts-per-category", type=click.IntRange(1), help="The most of a kind.  [default: all; --quick: 1]")
@click.option("--num-speculative-tokens", "-k", "k", type=int, help="K of those that draft.  [default: the bundle's]")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(2),
    help="Of each answer.  [default: 64, --quick 32; fewer for want of time]",
)
@click.option("--num-runs", type=click.IntRange(1), help="The most answers to each prompt.  [default: 3; --quick: 1]")
@click.option("--temperature", type=click.FloatRange(0, 100), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--threads", type=click.IntRange(1, MAX_THREADS), help="[default: the cores this process may use]")
@click.option(
    "--budget-minutes",
    type=float,
    help="Stop after so long, with what is whole, and say what is missing; 0 has no limit.  [default: 9; --quick: 1.7]",
)
@click.option(
    "--quick", is_flag=True, help="One short prompt of each category, in under two minutes for a small model."
)
@click.option("--one-at-a-time", is_flag=True, help="Load one process after the other; needs less memory.")
@click.option("--source", help="The torch model of the target.  [default: where the bundle came from]")
@click.option("--draft-source", help="The torch model of the draft.  [default: where the bundle came from]")
@click.option("--gguf", type=FILE, help="What llama.cpp reads.  [default: the .gguf file that the bundle came from]")
@click.option("--json", "json_file", type=OUTPUT, help="Write everything to this file; needed for --resume.")
@click.option(
    "--html", "html_file", type=OUTPUT, help="Write a report to this file, and its charts as PNGs next to it."
)
@click.option("--resume", is_flag=True, help="Go on with the interrupted bench of the same --json.")
def bench(bundle: Path, **options: Any) -> None:
    """Measure BUNDLE's speculation against PyTorch and against plain decoding, and say where it loses.

    All methods get the same prompt ids, threads and limits, take turns prompt by prompt, and their ids are compared.
    """
    from specrt.tools.bench.command import run_command

    run_command(bundle, **options)
