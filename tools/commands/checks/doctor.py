"""``specrt doctor``: what this machine can run."""

from __future__ import annotations

import json

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Show what this machine can export, build and run, and how to install what is missing."""
    from specrt.tools.doctor import examine, print_diagnosis

    diagnosis = examine()
    if as_json:
        click.echo(json.dumps(diagnosis.as_dict()))
    else:
        print_diagnosis(diagnosis)
