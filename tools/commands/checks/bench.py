"""``specrt bench``: methods measured on the same prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from specrt.engines.errors import UsageError
from specrt.tools.terminal.options import PROMPTS, TEMPERATURE, THREADS
from specrt.tools.terminal.outputs import OUTPUT_FILE as OUTPUT

FILE = click.Path(path_type=Path)
BASELINES = "Some of eager, eager-bf16, eager-compiled, assisted, assisted-bf16, lookup, llama.cpp, genai, plain."

_FOR_URLS = (
    *("prompts", "categories", "prompts_per_category", "max_new_tokens"),
    *("num_runs", "temperature", "threads", "json_file"),
)


@click.command()
@click.argument("bundle", type=FILE, required=False)
@click.option("--url", "urls", multiple=True, help="Measure a server of OpenAI's API instead; several take turns.")
@click.option("--clients", default="1", show_default=True, help="With --url: how many at a time, such as 1,4.")
@click.option("--model", help="With --url: the model to ask for.  [default: none is named]")
@click.option("--api-key-file", type=FILE, help="With --url: a file whose first word is the key.")
@click.option("--baseline", default="eager,plain", show_default=True, help=BASELINES)
@click.option("--categories", help="Comma-separated categories of the built-in prompts.  [default: all]")
@PROMPTS
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
@TEMPERATURE
@THREADS
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
@click.option("--resume", is_flag=True, help="Go on with the interrupted bench of the same --json.")
def bench(bundle: Path | None, urls: tuple[str, ...], **options: Any) -> None:
    """Measure BUNDLE's speculation against PyTorch and against plain decoding, and say where it loses.

    All methods get the same prompt ids, threads and limits, take turns prompt by prompt, and their ids are compared.
    With --url servers are measured: time to first token, time per token, tokens/s; with BUNDLE also the library.
    """
    remote = {name: options.pop(name) for name in ("clients", "model", "api_key_file")}
    context = click.get_current_context()
    given = [name for name in context.params if context.get_parameter_source(name) == ParameterSource.COMMANDLINE]
    if urls:
        if wrong := [name for name in given if name not in (*_FOR_URLS, *remote, "bundle", "urls")]:
            raise UsageError(f"--url: got {wrong[0]} too, which is for bundles; leave it out")
        from specrt.tools.bench.remote.command import run_urls

        run_urls(bundle, urls, **remote, **{name: options[name] for name in _FOR_URLS})
        return
    if wrong := [name for name in given if name in remote]:
        raise UsageError(f"--{wrong[0].replace('_', '-')}: it is for servers; give --url too")
    if bundle is None:
        raise UsageError("bench: got no bundle, expected BUNDLE or --url")
    from specrt.tools.bench.command import run_command

    run_command(bundle, **options)
