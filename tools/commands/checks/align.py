"""``specrt align``: how well a draft predicts a target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specrt.tools.prompting.options import MAX_THREADS
from specrt.tools.terminal.outputs import OUTPUT_FILE as OUTPUT

FILE = click.Path(path_type=Path)


@click.command()
@click.argument("bundle", type=FILE)
@click.option("--prompts", "file", type=FILE, help="Your prompts: one per line, or JSON lines.  [default: built-in]")
@click.option("--num-prompts", default=24, show_default=True, help="Use the first N prompts; 0 uses all.")
@click.option("--max-new-tokens", type=click.IntRange(2), default=48, show_default=True, help="For each prompt.")
@click.option("--temperature", type=click.FloatRange(0, 100), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--threads", type=click.IntRange(1, MAX_THREADS), help="[default: the cores this process may use]")
@click.option("--json", "json_file", type=OUTPUT, help="Write everything to this file; 'specrt plan --from' reads it.")
def align(
    bundle: Path, file: Path | None, num_prompts: int, max_new_tokens: int, json_file: Path | None, **options: Any
) -> None:
    """Measure how well BUNDLE's draft predicts its target on your prompts, and whether it is worth using.

    The target generates its own text; both models then read it, so that one run gives the acceptance at every K.
    """
    from specrt.tools.align.align import align as run
    from specrt.tools.align.align import print_alignment
    from specrt.tools.prompting.prompts import bench_prompts, prompts_from_file
    from specrt.tools.terminal.progress import shown_steps

    prompts = prompts_from_file(file) if file is not None else bench_prompts()
    prompts = prompts[: num_prompts or None]
    with shown_steps(len(prompts) + 1) as progress:
        found = run(bundle, prompts, max_new_tokens, progress=progress, **options)
    print_alignment(found, json_file)
