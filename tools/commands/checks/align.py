"""``specrt align``: how well a draft predicts a target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specrt.tools.terminal.options import PROMPTS, TEMPERATURE, THREADS
from specrt.tools.terminal.outputs import OUTPUT_FILE as OUTPUT

FILE = click.Path(path_type=Path)


@click.command()
@click.argument("bundle", type=FILE)
@PROMPTS
@click.option("--num-prompts", default=24, show_default=True, help="Use the first N prompts; 0 uses all.")
@click.option("--max-new-tokens", type=click.IntRange(2), default=48, show_default=True, help="For each prompt.")
@TEMPERATURE
@THREADS
@click.option("--json", "json_file", type=OUTPUT, help="Write everything to this file; 'specrt plan --from' reads it.")
def align(
    bundle: Path, prompts: Path | None, num_prompts: int, max_new_tokens: int, json_file: Path | None, **options: Any
) -> None:
    """Measure how well BUNDLE's draft predicts its target on your prompts, and whether it is worth using.

    The target generates its own text; both models then read it, so that one run gives the acceptance at every K.
    """
    from specrt.tools.align.align import align as run
    from specrt.tools.align.align import print_alignment
    from specrt.tools.prompting.prompts import bench_prompts, prompts_from_file
    from specrt.tools.terminal.progress import shown_steps

    chosen = (prompts_from_file(prompts) if prompts is not None else bench_prompts())[: num_prompts or None]
    with shown_steps(len(chosen) + 1) as progress:
        found = run(bundle, chosen, max_new_tokens, progress=progress, **options)
    print_alignment(found, json_file)
