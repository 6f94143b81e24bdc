"""``specrt bench``: methods measured on the same prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specrt.tools.prompting.options import MAX_THREADS
from specrt.tools.terminal.outputs import OUTPUT_FILE as OUTPUT

FILE = click.Path(path_type=Path)
BASELINES = "Some of eager, eager-bf16, eager-compiled, assisted, assisted-bf16, lookup, llama.cpp, genai, plain."


@click.command()
@click.argument("bundle", type=FILE)
@click.option("--baseline", default="eager,plain", show_default=True, help=BASELINES)
@click.option("--categories", help="Comma-separated categories of the built-in prompts.  [default: all]")
@click.option("--prompts", "file", type=FILE, help="Your prompts: one per line, or JSON lines.  [default: built-in]")
@click.option(
    "--prompts-per-category", type=click.IntRange(1), help="The most of a category.  [default: all; --quick: 1]"
)
@click.option("--num-speculative-tokens", "-k", "k", type=int, help="K of methods that draft.  [default: the bundle's]")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(2),
    help="The most tokens of an answer.  [default: 64; --quick: 32; fewer if time is short]",
)
@click.option("--num-runs", type=click.IntRange(1), help="The most answers per prompt.  [default: 3; --quick: 1]")
@click.option("--temperature", type=click.FloatRange(0, 100), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--threads", type=click.IntRange(1, MAX_THREADS), help="[default: the cores this process may use]")
@click.option(
    "--budget-minutes",
    type=float,
    help="Stop after this time and report what is missing; 0 has no limit.  [default: 9; --quick: 1.7]",
)
@click.option(
    "--quick", is_flag=True, help="One short prompt of each category, in under two minutes for a small model."
)
@click.option("--one-at-a-time", is_flag=True, help="Load one process after the other; needs less memory.")
@click.option("--source", help="The torch model of the target.  [default: the bundle's source]")
@click.option("--draft-source", help="The torch model of the draft.  [default: the bundle's source]")
@click.option("--gguf", type=FILE, help="The file for llama.cpp.  [default: the bundle's source if it is a .gguf file]")
@click.option("--json", "json_file", type=OUTPUT, help="Write everything to this file; needed for --resume.")
@click.option(
    "--html", "html_file", type=OUTPUT, help="Write a report to this file, and its charts as PNGs next to it."
)
@click.option("--resume", is_flag=True, help="Continue the interrupted bench of the same --json.")
def bench(bundle: Path, **options: Any) -> None:
    """Measure BUNDLE's speculation against PyTorch and plain decoding, and report where it is slower.

    All methods get the same prompt ids, threads and limits, take turns prompt by prompt, and their ids are compared.
    """
    from specrt.tools.bench.command import run_command

    run_command(bundle, **options)
