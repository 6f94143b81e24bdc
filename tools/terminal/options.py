"""Options that several commands have, each defined once."""

from __future__ import annotations

from pathlib import Path

import click

MAX_THREADS = 1024

AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
PROMPTS = click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help="Your prompts: one per line, or JSON lines.  [default: built-in]",
)
TEMPERATURE = click.option(
    "--temperature", type=click.FloatRange(0, 100), default=0.0, show_default=True, help="0 is greedy."
)
THREADS = click.option(
    "--threads", type=click.IntRange(1, MAX_THREADS), help="[default: the cores this process may use]"
)
TRUST_REMOTE_CODE = click.option(
    "--trust-remote-code", is_flag=True, help="Run model code that comes with a hub model."
)
VERBOSE = click.option("--verbose", is_flag=True, help="Print the effective settings to standard error first.")
