"""``specrt generate``: text from a prompt."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from specrt.engines.errors import UsageError
from specrt.tools.prompting.options import (
    generation_option,
    generation_options,
    kind_of,
    options_from_command,
    place_of,
    place_options,
    print_settings,
    prompt_of,
)
from specrt.tools.terminal.options import VERBOSE
from specrt.tools.terminal.streams import json_text


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompt", help="A user message, or with --raw plain text; '-' reads it from standard input.")
@click.option("--prompt-file", type=click.Path(path_type=Path), help="The same from a file, without one final newline.")
@click.option("--messages", type=click.Path(path_type=Path), help="A JSON file: a list of {role, content}.")
@click.option("--raw", is_flag=True, help="Continue the prompt as plain text: use no chat template.")
@click.option("--system", help="A system message before the prompt.")
@generation_option("continue_final_message", is_flag=True)
@generation_options
@place_options
@generation_option("logprobs", more="With --json.", metavar="N")
@click.option("--stats", is_flag=True, help="Print the figures to standard error at the end.")
@VERBOSE
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a stream of text.")
def generate(bundle: Path, as_json: bool, stats: bool, verbose: bool, **options: Any) -> None:
    """Generate from BUNDLE; the text streams to standard output.

    The prompt is a user message where the bundle has a chat template, else plain text; a note on standard error states
    which. Without sampling options decoding is greedy; with --temperature the text is sampled from the target's
    distribution.
    """
    if options["logprobs"] is not None and not as_json:
        raise UsageError("--logprobs: log-probabilities are part of the JSON object; add --json")
    given = prompt_of(*map(options.pop, ("prompt", "prompt_file", "messages", "raw", "system")))
    place = place_of(options)
    import specrt
    from specrt.tools.figures import print_stats
    from specrt.tools.hashing import checked_manifest
    from specrt.tools.machine import peak_bytes

    started = time.perf_counter()
    checked_manifest(bundle)
    with specrt.load(bundle, **place) as runtime:
        load_s = time.perf_counter() - started
        prompt, note = given.for_bundle(runtime.manifest.tokenizer)
        stream = runtime.stream(prompt, **options_from_command(options))
        click.echo(f"specrt: the prompt is {note}", err=True)
        if verbose:
            print_settings(stream.settings)
        for piece in stream:
            if not as_json:
                click.echo(piece, nl=False)
        if as_json:
            click.echo(json_text({"prompt_kind": kind_of(prompt), **stream.result.as_dict()}))
        else:
            click.echo()
        if stats:
            print_stats(stream.result, load_s, peak_bytes())
