"""The options of ``generate`` and ``chat``, and their way into ``specrt.runtime.options``; settings for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import click
from rich.console import Console
from rich.table import Table

from specrt.engines.errors import UsageError
from specrt.engines.load import DEVICES
from specrt.runtime.options import DRAFTS, RULES, Options
from specrt.runtime.settings import Settings

MAX_THREADS = 1024
_Command = TypeVar("_Command", bound=Callable[..., Any])

_GENERATION = (
    click.option("--max-new-tokens", default=256, show_default=True, help="The most new tokens."),
    click.option("--min-new-tokens", default=0, help="Nothing ends the text before.  [default: 0]"),
    click.option("--num-speculative-tokens", "-k", type=int, help="K; 0 is plain decoding.  [default: the bundle's]"),
    click.option("--draft", type=click.Choice(DRAFTS), help="[default: the bundle's own]"),
    click.option("--rule", type=click.Choice(RULES), help="[default: block where the draft samples, else match]"),
    click.option("--temperature", type=float, help="0 is greedy.  [default: 0]"),
    click.option("--top-k", type=int, help="Keep the k most likely tokens; 0 keeps all.  [default: 0]"),
    click.option("--top-p", type=float, help="Keep the likeliest that reach this probability.  [default: 1]"),
    click.option("--min-p", type=float, help="Keep this share of the likeliest one's probability.  [default: 0]"),
    click.option("--seed", type=int, help="The text becomes a function of this and the target: with any draft and K."),
    click.option("--repetition-penalty", type=float, help="Divides the logits of what occurred.  [default: 1]"),
    click.option("--presence-penalty", type=float, help="Subtracted from what was generated.  [default: 0]"),
    click.option("--frequency-penalty", type=float, help="The same, for each time it was.  [default: 0]"),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text. May be given several times."),
    click.option("--stop-token-id", "stop_token_ids", multiple=True, type=int, help="End with this token, as EOS."),
    click.option("--ignore-eos", is_flag=True, help="Do not stop at the end-of-sequence tokens."),
    click.option("--reproducible", is_flag=True, default=None, help="The same bits of logits for every draft and K."),
    click.option("--model-defaults", is_flag=True, help="Take what is not given from the model's generation config."),
)
_PLACE = (
    click.option("--backend", help="One of the bundle's backends.  [default: its first]"),
    click.option("--device", type=click.Choice(DEVICES), help="[default: cpu; with a TensorRT backend cuda]"),
    click.option("--draft-backend", help="The draft's.  [default: --backend]"),
    click.option("--draft-device", type=click.Choice(DEVICES), help="The draft's.  [default: --device]"),
    click.option("--threads", type=click.IntRange(1, MAX_THREADS), help="[default: the cores this process may use]"),
)


def generation_options(command: _Command) -> _Command:
    """Add the options of a generation to a click command."""
    for option in reversed(_GENERATION):
        command = option(command)
    return command


def place_options(command: _Command) -> _Command:
    """Add the options of where a bundle runs to a click command."""
    for option in reversed(_PLACE):
        command = option(command)
    return command


def place_of(options: dict[str, Any]) -> dict[str, Any]:
    """Take the options of where a bundle runs out of ``options``: keyword arguments of ``specrt.load``."""
    return {name: options.pop(name) for name in ("backend", "threads", "device", "draft_backend", "draft_device")}


def options_from_command(values: dict[str, Any]) -> Options:
    """What was given, as keyword arguments of ``generate``; what was not is left out."""
    return cast(Options, {name: value for name, value in values.items() if value is not None})


def print_settings(settings: Settings) -> None:
    """The effective settings and where each came from, on standard error."""
    table = Table(title="effective settings", title_justify="left")
    for heading in ("setting", "value", "from"):
        table.add_column(heading)
    for name, entry in settings.as_dict().items():
        table.add_row(name, str(entry["value"]), entry["source"])
    Console(stderr=True).print(table, markup=False)


def prompt_of(text: str | None, file: Path | None, messages: Path | None) -> Any:
    """The prompt that exactly one of the three gives. Raises ``UsageError``."""
    given = [value for value in (text, file, messages) if value is not None]
    if len(given) != 1:
        raise UsageError(f"prompt: got {len(given)} of --prompt, --prompt-file and --messages, expected exactly one")
    if text is not None and text != "-":
        return text
    path = file or messages
    try:
        data = path.read_bytes() if path is not None else sys.stdin.buffer.read()
        content = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path or 'standard input'}: cannot be read as text ({error}); give UTF-8 text") from error
    if messages is None:
        return content
    try:
        parsed = json.loads(content)
    except ValueError as error:
        raise UsageError(f"{path}: not JSON ({error}); expected a list of {{role, content}} objects") from error
    if not isinstance(parsed, list) or not all(isinstance(item, dict) for item in parsed):
        raise UsageError(f"{path}: got {type(parsed).__name__}, expected a list of {{role, content}} objects")
    return parsed
