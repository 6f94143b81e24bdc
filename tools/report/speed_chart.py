"""``python -m specrt.tools.report.speed_chart BENCH.json --write docs/images/speed.svg``: a bar for each method.

The picture is plain SVG of a few kilobytes. Its text is grey, which is readable on light and on dark pages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import click

from specrt.engines.errors import UsageError
from specrt.engines.storage.files import write_text_file
from specrt.tools.report.charts import COLOURS
from specrt.tools.report.readme_table import busy_warning
from specrt.tools.terminal.failure import Tool
from specrt.tools.terminal.process import run_process

NAMES = {
    "eager": "transformers eager",
    "genai": "ONNX Runtime GenAI",
    "llama.cpp": "llama.cpp",
    "plain": "specrt plain",
    "auto": "specrt speculative",
}
SHOWN = "eager,genai,plain,auto"
GREY = "#757c86"
WIDTH, LEFT, RIGHT, TOP, STEP, BAR = 720, 170, 150, 40, 36, 22  # pixels
REFERENCE = "eager"


def chart_of(bench: dict[str, Any], shown: Sequence[str]) -> str:
    """The SVG of the methods of ``shown``, from the output of ``specrt bench --json``; missing methods are left out.

    A line through a bar's end is the 95 % interval of the method's ratio to ``eager``, times the speed of ``eager``.
    """
    scores = {row["method"]: row for row in bench["scores"]}
    rows = [scores[name] for name in shown if name in scores]
    largest = max(max(row["tokens_per_s"], *(_interval(row, scores) or (0.0,))) for row in rows)
    scale = (WIDTH - LEFT - RIGHT) / largest  # pixels for each token/s
    bars = [line for index, row in enumerate(rows) for line in _bar(index, row, scores, scale)]
    notes = _notes(bench)
    below = TOP + STEP * len(rows)
    height = below + 16 + 18 * len(notes)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="14" fill="{GREY}">',
        f"<title>{escape('Tokens per second of ' + ', '.join(_name(row) for row in rows))}</title>",
        '<text x="0" y="20" font-size="16" font-weight="600">Tokens per second, line: 95 % interval</text>',
        *bars,
        *(
            f'<text x="0" y="{below + 16 + 18 * index}" font-size="11">{escape(note)}</text>'
            for index, note in enumerate(notes)
        ),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _notes(bench: dict[str, Any]) -> list[str]:
    """Settings, machine and date, and a warning if the figures are unreliable."""
    machine, prompts = bench["machine"], bench["prompts"]
    kinds = len({entry["category"] for entry in prompts})
    notes = [
        str(bench["bundle"]),
        f"tokens/s with the prompt; {len(prompts)} prompts of {kinds} kinds, at most "
        f"{bench['settings']['max_new_tokens']} tokens; {machine['cpu']}, {machine['threads']} threads; "
        f"{bench['created_utc'][:10]}",
    ]
    return [*notes, warning] if (warning := busy_warning(bench)) else notes


def _bar(index: int, row: dict[str, Any], scores: dict[str, Any], scale: float) -> list[str]:
    top = TOP + STEP * index
    speed, middle = row["tokens_per_s"], top + BAR / 2
    end = speed
    lines = [
        f'<text x="0" y="{middle + 5:g}">{escape(_name(row))}</text>',
        f'<rect x="{LEFT}" y="{top}" width="{speed * scale:.1f}" height="{BAR}" rx="2" fill="{_colour(row)}"/>',
    ]
    if interval := _interval(row, scores):
        low, high = (LEFT + at * scale for at in interval)
        lines += [
            f'<path d="M{low:.1f} {middle:g}H{high:.1f}" stroke="{colour}" stroke-width="{width}"/>'
            for colour, width in (("#fff", 4), ("#24292f", 2))  # visible on any bar and background
        ]
        end = max(speed, interval[1])
    ratio = row["ratio_to"].get(REFERENCE)
    times = f" ({ratio:.1f}x eager)" if ratio is not None and row["method"] != REFERENCE else ""
    return [*lines, f'<text x="{LEFT + end * scale + 8:.1f}" y="{middle + 5:g}">{speed:.1f}{times}</text>']


def _colour(row: dict[str, Any]) -> str:
    """A colour for each kind of method: transformers, other runtimes, specrt without and with drafts."""
    if row["draft_acceptance_rate"] is not None:
        return COLOURS[2]
    return {"plain": COLOURS[1], "genai": COLOURS[3], "llama.cpp": COLOURS[3]}.get(row["method"], "#a9b1bd")


def _interval(row: dict[str, Any], scores: dict[str, Any]) -> tuple[float, ...] | None:
    """The interval in tokens per second."""
    found = row["interval_of"].get(REFERENCE)
    if found is None or row["method"] == REFERENCE:
        return None
    return tuple(ratio * scores[REFERENCE]["tokens_per_s"] for ratio in found)


def _name(row: dict[str, Any]) -> str:
    method = str(row["method"])
    return NAMES.get(method, method)


@click.command(cls=Tool)
@click.argument("bench", type=click.Path(path_type=Path))
@click.option("--write", "picture", type=click.Path(path_type=Path), help="Write this file instead of standard output.")
@click.option("--methods", default=SHOWN, show_default=True, help="Methods to show, comma-separated.")
def main(bench: Path, picture: Path | None, methods: str) -> None:
    """Draw the speeds of BENCH, a file that 'specrt bench --json' wrote."""
    try:
        svg = chart_of(json.loads(bench.read_text(encoding="utf-8-sig")), methods.split(","))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{bench}: not a file of 'specrt bench --json' ({type(error).__name__}: {error})") from error
    if picture is None:
        click.echo(svg, nl=False)
    else:
        write_text_file(picture, svg)


if __name__ == "__main__":
    run_process(lambda: main)
