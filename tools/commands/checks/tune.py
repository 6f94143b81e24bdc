"""``specrt tune``: times and acceptance on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from specrt.tools.prompting.options import (
    MAX_THREADS,
)


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompts", type=click.Path(path_type=Path), help="Your prompts: one per line, or JSON lines.")
@click.option("--threads", type=click.IntRange(1, MAX_THREADS), help="[default: the cores this process may use]")
@click.option("--max-new-tokens", type=click.IntRange(8), default=48, show_default=True, help="After each prompt.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def tune(bundle: Path, as_json: bool, **options: Any) -> None:
    """Measure passes and drafts of BUNDLE on this machine, so that each round's K is chosen well from the start.

    Takes one to a few minutes; run nothing else meanwhile. The result is stored next to the bundle, as
    NAME.tuning.json.
    """
    from specrt.engines.codec import to_json
    from specrt.tools.tune.tune import print_tuning
    from specrt.tools.tune.tune import tune as run

    tuning = run(bundle, **options)
    if as_json:
        click.echo(json.dumps(to_json(tuning)))
    else:
        print_tuning(bundle, tuning)
