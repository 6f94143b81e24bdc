"""``specrt tune``: times and acceptance on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from specrt.tools.prompting.options import place_options
from specrt.tools.terminal.options import AS_JSON, PROMPTS


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@PROMPTS
@click.option("--max-new-tokens", type=click.IntRange(8), default=48, show_default=True, help="After each prompt.")
@place_options
@AS_JSON
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
