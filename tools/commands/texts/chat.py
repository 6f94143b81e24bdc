"""``specrt chat``: a conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specrt.tools.prompting.options import (
    generation_option,
    generation_options,
    options_from_command,
    place_of,
    place_options,
)
from specrt.tools.terminal.options import VERBOSE


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--system", help="A system message to start with.")
@generation_options
@place_options
@generation_option("logprobs", more="After each answer.", metavar="N")
@VERBOSE
def chat(bundle: Path, system: str | None, verbose: bool, **options: Any) -> None:
    """Chat with BUNDLE. Ctrl-C ends an answer, Ctrl-D the conversation; /reset starts over, /help lists commands."""
    place = place_of(options)
    import specrt
    from specrt.tools.chat import Chat
    from specrt.tools.hashing import checked_manifest

    checked_manifest(bundle)
    with specrt.load(bundle, **place) as runtime:
        Chat(runtime, options_from_command(options), system, verbose).run()
