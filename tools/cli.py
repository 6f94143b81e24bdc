"""The ``specrt`` command. Heavy imports happen inside the command that needs them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from specrt import __version__
from specrt.engines.errors import SpecrtError, UsageError
from specrt.tools.making import COMMANDS as MAKING
from specrt.tools.measuring import COMMANDS as MEASURING
from specrt.tools.prompting.options import (
    MAX_THREADS,
    generation_options,
    kind_of,
    options_from_command,
    place_of,
    place_options,
    print_settings,
    prompt_of,
)
from specrt.tools.terminal.failure import OneLine
from specrt.tools.terminal.outputs import OutputFile
from specrt.tools.terminal.process import run_specrt
from specrt.tools.terminal.streams import json_text


class _Cli(OneLine, click.Group):
    """The group of all commands."""


@click.group(cls=_Cli, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, "--version", prog_name="specrt")
def main() -> None:
    """Speculative decoding: export a target and a draft, then generate the target's own text faster."""


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompt", help="A user message, or with --raw plain text; '-' reads it from standard input.")
@click.option("--prompt-file", type=click.Path(path_type=Path), help="The same from a file, less one final newline.")
@click.option("--messages", type=click.Path(path_type=Path), help="A JSON file: a list of {role, content}.")
@click.option("--raw", is_flag=True, help="Continue the prompt as plain text: use no chat template.")
@click.option("--system", help="A system message before the prompt.")
@click.option("--continue-final-message", is_flag=True, help="Continue the last of --messages, the assistant's.")
@generation_options
@place_options
@click.option("--logprobs", type=int, metavar="N", help="With --json: log-probabilities of tokens and N others.")
@click.option("--stats", is_flag=True, help="Print the figures to standard error at the end.")
@click.option("--verbose", is_flag=True, help="Print the effective settings to standard error first.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a stream of text.")
def generate(bundle: Path, as_json: bool, stats: bool, verbose: bool, **options: Any) -> None:
    """Generate from BUNDLE; the text streams to standard output.

    The prompt is a user message where the bundle has a chat template, else plain text; a note on standard error says
    which. Without sampling options decoding is greedy; with --temperature the text is drawn from the target's
    distribution.
    """
    if options["logprobs"] is not None and not as_json:
        raise UsageError("--logprobs: they are part of the JSON object; add --json")
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


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--system", help="A system message to begin with.")
@generation_options
@place_options
@click.option(
    "--logprobs", type=int, metavar="N", help="After each answer, its tokens' log-probabilities and N others."
)
@click.option("--verbose", is_flag=True, help="Print the effective settings to standard error first.")
def chat(bundle: Path, system: str | None, verbose: bool, **options: Any) -> None:
    """Talk with BUNDLE. Ctrl-C ends an answer, Ctrl-D the conversation; /reset begins again, /help lists commands."""
    place = place_of(options)
    import specrt
    from specrt.tools.chat import Chat
    from specrt.tools.hashing import checked_manifest

    checked_manifest(bundle)
    with specrt.load(bundle, **place) as runtime:
        Chat(runtime, options_from_command(options), system, verbose).run()


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompts", type=click.Path(path_type=Path), help="Prompts of your own: one a line, or JSON lines.")
@place_options
@click.option("--max-new-tokens", type=click.IntRange(8), default=32, show_default=True, help="Of each text compared.")
@click.option("--num-draws", type=click.IntRange(1000), default=4000, show_default=True, help="Of the chi-square test.")
@click.option("--source", metavar="TARGET", help="Compare the target's weights with the files of this model.")
@click.option("--draft-source", metavar="DRAFT", help="The same for the draft.")
@click.option("--output", "-o", type=OutputFile("the certificate"), help="Where to store the certificate as JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def verify(bundle: Path, as_json: bool, **options: Any) -> None:
    """Check on this machine that speculation changes nothing that BUNDLE's target says. Exit code 0 or 1."""
    from specrt.tools.verify.certificate import certify, print_certificate

    certificate = certify(bundle, place_of(options), **options, tell=lambda line: click.echo(line, err=True))
    try:
        if as_json:
            click.echo(json.dumps(certificate.as_dict()))
        else:
            print_certificate(certificate)
    finally:  # a reader that goes away does not make it pass
        if failed := [check.name for check in certificate.checks if not check.passed]:
            raise SpecrtError(
                f"{bundle}: {len(failed)} of {len(certificate.checks)} checks failed: {', '.join(failed)}"
            )


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompts", type=click.Path(path_type=Path), help="Prompts of your own: one a line, or JSON lines.")
@click.option("--threads", type=click.IntRange(1, MAX_THREADS), help="[default: the cores this process may use]")
@click.option("--max-new-tokens", type=click.IntRange(8), default=48, show_default=True, help="After each prompt.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def tune(bundle: Path, as_json: bool, **options: Any) -> None:
    """Measure passes and drafts of BUNDLE on this machine, so that each round's K is chosen well from the start.

    Takes a minute or a few, next to no other work. The result is kept next to the bundle, as NAME.tuning.json.
    """
    from specrt.engines.codec import to_json
    from specrt.tools.tune.tune import print_tuning
    from specrt.tools.tune.tune import tune as run

    tuning = run(bundle, **options)
    if as_json:
        click.echo(json.dumps(to_json(tuning)))
    else:
        print_tuning(bundle, tuning)


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--check", is_flag=True, help="Hash every file again; do engines fit this machine?")
def inspect(bundle: Path, as_json: bool, check: bool) -> None:
    """Show what BUNDLE holds: roles, the I/O table, widths, bytes of weights and KV."""
    from specrt.tools.builds import builds_of, print_builds
    from specrt.tools.figures import inspection, print_inspection
    from specrt.tools.hashing import checked_manifest

    manifest = checked_manifest(bundle, always_hash=check)
    builds = builds_of(bundle, manifest, check)
    if as_json:
        click.echo(json.dumps(inspection(manifest, builds)))
    else:
        print_inspection(manifest, builds)
        print_builds(builds)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Show what this machine can export, build and run, and how to install what is missing."""
    from specrt.tools.doctor import examine, print_diagnosis

    diagnosis = examine()
    if as_json:
        click.echo(json.dumps(diagnosis.as_dict()))
    else:
        print_diagnosis(diagnosis)


@main.command()
@click.argument("names", nargs=-1, required=True)
def fetch(names: tuple[str, ...]) -> None:
    """Fetch small real models by NAME (smollm2-135m, qwen2.5-coder-0.5b, qwen2.5-coder-1.5b, gemma3-270m)."""
    from specrt.tools.lab.models import fetch as run

    for name in names:
        click.echo(run(name))


for _command in (*MAKING, *MEASURING):
    main.add_command(_command)


def run() -> None:
    """The entry point, where this file is run itself."""
    run_specrt()


if __name__ == "__main__":
    run()
