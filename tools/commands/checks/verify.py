"""``specrt verify``: checks on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from specrt.engines.errors import SpecrtError
from specrt.tools.prompting.options import (
    place_of,
    place_options,
)
from specrt.tools.terminal.options import AS_JSON, PROMPTS
from specrt.tools.terminal.outputs import OutputFile


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@PROMPTS
@place_options
@click.option("--max-new-tokens", type=click.IntRange(8), default=32, show_default=True, help="For each compared text.")
@click.option(
    "--num-draws", type=click.IntRange(1000), default=4000, show_default=True, help="For the chi-square test."
)
@click.option("--source", metavar="TARGET", help="Compare the target's weights with the files of this model.")
@click.option("--draft-source", metavar="DRAFT", help="The same for the draft.")
@click.option("--output", "-o", type=OutputFile("the certificate"), help="Where to store the certificate as JSON.")
@AS_JSON
def verify(bundle: Path, as_json: bool, **options: Any) -> None:
    """Check on this machine that speculation changes nothing that BUNDLE's target says. Exit code 0 or 1."""
    from specrt.tools.terminal.progress import shown_steps
    from specrt.tools.verify.certificate import CHECKS, certify, print_certificate

    with shown_steps(len(CHECKS)) as progress:
        certificate = certify(bundle, place_of(options), **options, progress=progress)
    try:
        if as_json:
            click.echo(json.dumps(certificate.as_dict()))
        else:
            print_certificate(certificate)
    finally:  # also when the reader of the output went away
        if failed := [check.name for check in certificate.checks if not check.passed]:
            raise SpecrtError(
                f"{bundle}: {len(failed)} of {len(certificate.checks)} checks failed: {', '.join(failed)}"
            )
