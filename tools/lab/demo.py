"""``make demo``: four ``specrt`` commands on SmolLM2-135M, each shown before it runs, and a chart of what they
measured.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specrt.engines.errors import INTERRUPTED_EXIT_CODE, SpecrtError
from specrt.engines.manifest import manifest_from_bundle
from specrt.tools.lab.models import fetch
from specrt.tools.terminal.failure import Tool
from specrt.tools.terminal.process import run_process
from specrt.tools.terminal.progress import shown_progress

MODEL = "smollm2-135m"
FOLDER = Path("bundles")
PROMPT = "Explain in two sentences why the sky is blue."
BAR_CHARACTERS = 40
console = Console(highlight=False, soft_wrap=True)


def run(*arguments: str) -> None:
    """Show a ``specrt`` command and run it. Raises ``SystemExit`` with its exit code where it fails."""
    console.print(f"\n[bold]$ specrt {escape(shlex.join(arguments))}[/bold]")
    done = subprocess.run([sys.executable, "-m", "specrt.tools.cli", *arguments], check=False)
    if done.returncode:
        raise SystemExit(INTERRUPTED_EXIT_CODE if done.returncode < 0 else done.returncode)


def is_exported(bundle: Path) -> bool:
    """Whether the bundle of an earlier demo exists."""
    try:
        return manifest_from_bundle(bundle).draft.shares_kv
    except SpecrtError:
        return False


def draw(bench: dict[str, object]) -> None:
    """Tokens per second of each method as bars."""
    rows = [(str(row["method"]), float(row["tokens_per_s"])) for row in bench["scores"]]  # type: ignore[attr-defined]
    largest, slowest = max(speed for _, speed in rows), dict(rows)["eager"]
    table = Table(title="tokens/s, prompt included", title_justify="left", box=None)
    for heading in ("", "", "tokens/s", "x eager"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, speed in rows:
        table.add_row(name, "█" * round(BAR_CHARACTERS * speed / largest), f"{speed:.1f}", f"{speed / slowest:.2f}")
    console.print()
    console.print(table)


@click.command(cls=Tool)
def main() -> None:
    """Export SmolLM2-135M with its own weights in 4 bits as the draft, generate, verify, and compare with
    transformers.
    """
    bundle, results = FOLDER / "smollm2", FOLDER / "smollm2-bench.json"
    FOLDER.mkdir(exist_ok=True)
    with shown_progress() as progress:
        model = fetch(MODEL, progress=progress)
    if is_exported(bundle):
        console.print(f"{bundle}: this bundle exists, so the export is skipped")
    else:
        run("export", str(model), "--draft", "self:int4", "--output", str(bundle), "--force")
    run("generate", str(bundle), "--prompt", PROMPT, "--max-new-tokens", "64", "--stats")
    run("verify", str(bundle), "--max-new-tokens", "12", "--num-draws", "1000")
    options = ["--quick", "--categories", "chat,code-edit,summary,creative", "--max-new-tokens", "48"]
    run("bench", str(bundle), *options, "--json", str(results))
    draw(json.loads(results.read_text(encoding="utf-8")))


if __name__ == "__main__":
    run_process(lambda: main)
