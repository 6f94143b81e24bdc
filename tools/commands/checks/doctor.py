"""``specrt doctor``: what this machine can run."""

from __future__ import annotations

import json

import click

from specrt.tools.terminal.options import AS_JSON


@click.command()
@AS_JSON
def doctor(as_json: bool) -> None:
    """Show what this machine can export, build and run, and how to install what is missing."""
    from specrt.tools.doctor import examine, print_diagnosis

    diagnosis = examine()
    if as_json:
        click.echo(json.dumps(diagnosis.as_dict()))
    else:
        print_diagnosis(diagnosis)
