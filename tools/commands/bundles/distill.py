"""``specrt distill``: a draft trained on the text that the target writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specrt.tools.terminal.options import THREADS, TRUST_REMOTE_CODE
from specrt.tools.terminal.outputs import OUTPUT_FOLDER


@click.command()
@click.argument("source", metavar="BUNDLE_OR_TARGET")
@click.option("--output", "-o", required=True, type=OUTPUT_FOLDER, metavar="HEAD", help="The folder to write.")
@click.option("--prompts", type=click.Path(path_type=Path), help="Your prompts: one per line, or JSON lines.")
@click.option("--minutes", type=float, help="Two fifths for the text, the rest for the training.  [default: 60]")
@click.option("--tokens", type=int, help="Tokens of text, in place of --minutes; four passes train on them.")
@click.option("--bundle", type=OUTPUT_FOLDER, metavar="DIR", help="Export the pair to this folder as well.")
@click.option(
    "--kind",
    type=click.Choice(("head", "layers")),
    default="head",
    show_default=True,
    help="An EAGLE-3 head, or the first and last layers of the target as a small model of its own.",
)
@click.option(
    "--writer",
    type=click.Choice(("auto", "torch", "runtime")),
    default="auto",
    show_default=True,
    help="What runs the target to write the text; auto is torch, many texts at a time, unless it is quantized.",
)
@click.option("--num-layers", default=4, show_default=True, help="Layers of --kind layers.")
@click.option("--max-draft-vocab", default=8192, show_default=True, help="The most ids that a head drafts.")
@click.option("--seed", default=0, show_default=True, help="Of the text and the training.")
@THREADS
@click.option("--keep-data", is_flag=True, help="Keep HEAD.training: the text, hidden states and checkpoints.")
@TRUST_REMOTE_CODE
@click.option("--force", is_flag=True, help="Replace an existing HEAD.")
def distill(**options: Any) -> None:
    """Train a draft for BUNDLE_OR_TARGET on text that the target writes itself.

    The target answers your prompts, or prompts that it writes in its own chat template; its hidden states are kept on
    disk. The draft learns from them and is written to HEAD in speculators' layout, for 'specrt export TARGET --draft
    eagle3:HEAD' ('--draft HEAD' with --kind layers). What was stopped continues when the same command is given again.
    """
    from specrt.tools.terminal.progress import quiet_libraries, shown_progress

    quiet_libraries()
    from specrt.tools.distill.distill import distill as run
    from specrt.tools.distill.options import DistillOptions
    from specrt.tools.distill.verdict import print_verdict

    with shown_progress() as progress:
        verdict = run(DistillOptions(**options), progress)
    print_verdict(verdict)
