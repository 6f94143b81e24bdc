"""``python -m specrt.tools.lab.readme --write README.md``: runs the README's commands and puts their output there.

The commands are in the block between the lines ``<!-- commands -->`` and ``<!-- /commands -->``, each after ``$ ``.
Those of ``specrt`` are run; ``pip install -q`` is not, because it has no output. If no hub can be reached, a folder
with the name of the hub id holds the same model's GGUF file, and the README says so. The middle of a long output is
left out.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path

import click

from specrt.engines.errors import SpecrtError, UsageError
from specrt.engines.storage.files import write_text_file
from specrt.tools.lab.models import fetch
from specrt.tools.report.readme_table import lines_around
from specrt.tools.terminal.failure import Tool
from specrt.tools.terminal.process import run_process

MODEL, FILES = "HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"
COLUMNS = 110
MOST_LINES, FIRST_LINES = 16, 8  # of an output; a longer one is cut to its first lines and its last one
Run = Callable[[str], str]  # the output of a command


def commands_of(block: str) -> list[str]:
    """The commands of a console block, without their output."""
    return re.findall(r"^\$ (.+)$", block, re.MULTILINE)


def with_output(document: str, run: Run, note: str) -> str:
    """``document`` with the output of its commands, and ``note`` below them. Raises ``UsageError`` without a block."""
    first, last = lines_around("commands")
    before, begin, rest = document.partition(first)
    block, end, after = rest.partition(last)
    if not begin or not end or not commands_of(block):
        raise UsageError(f"the document: got no commands between {first} and {last}, expected a console block there")
    lines = []
    for command in commands_of(block):
        lines.append(f"$ {command}")
        if command.startswith("specrt "):
            lines += cut([line.rstrip() for line in run(command).strip().splitlines()])
    return f"{before}{first}\n```console\n" + "\n".join(lines) + f"\n```\n\n{note}\n{last}{after}"


def cut(lines: list[str]) -> list[str]:
    """``lines``, or the first ones, how many are left out, and the last one."""
    if len(lines) <= MOST_LINES:
        return lines
    return [*lines[:FIRST_LINES], f"[{len(lines) - FIRST_LINES - 1} lines left out here]", lines[-1]]


def runner(folder: Path) -> Run:
    """Runs commands in ``folder``. Raises ``SpecrtError`` for one that fails."""

    def run(command: str) -> str:
        click.echo(f"$ {command}", err=True)
        done = subprocess.run(
            [sys.executable, "-m", "specrt.tools.cli", *shlex.split(command)[1:]],
            cwd=folder,
            env={**os.environ, "COLUMNS": str(COLUMNS), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            last = (done.stdout.strip().splitlines() or ["no output"])[-1]
            raise SpecrtError(f"{command}: ended with {done.returncode} ({last})")
        return done.stdout

    return run


def has_hub() -> bool:
    """Whether the hub answers for the model."""
    from huggingface_hub.constants import ENDPOINT

    try:
        with urllib.request.urlopen(f"{ENDPOINT}/api/models/{MODEL}", timeout=5):
            return True
    except OSError:
        return False


def place_files(folder: Path) -> None:
    """Put the model's GGUF file into a folder with the name of the hub id, below ``folder``."""
    file = fetch(FILES)
    place = folder / MODEL / file.name
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.exists():
        place.symlink_to(file)


@click.command(cls=Tool)
@click.option("--write", "document", type=click.Path(path_type=Path), required=True, help="The README.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to run them.  [default: a temporary folder]")
def main(document: Path, folder: Path | None) -> None:
    """Run the README's commands and write what they print."""
    with tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        note = "Output made by `python -m specrt.tools.lab.readme`"
        if has_hub():
            note += "."
        else:
            place_files(place)
            note += "; no hub could be reached, so this model's files came from a local folder, as a GGUF file in Q4_1."
        write_text_file(document, with_output(document.read_text(encoding="utf-8"), runner(place), note))


if __name__ == "__main__":
    run_process(lambda: main)
