"""``python -m specrt.tools.report.readme_table BENCH.json --write DOCUMENT.md``: the table of ``specrt bench --json``.

The table is between the lines ``<!-- bench -->`` and ``<!-- /bench -->``, or those of another ``--mark``. Without
``--write`` it is printed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from specrt.engines.errors import UsageError
from specrt.engines.storage.files import write_text_file
from specrt.tools.bench.tables import with_interval
from specrt.tools.machine import QUIET_PERCENT
from specrt.tools.terminal.failure import Tool
from specrt.tools.terminal.process import run_process

MARK = "bench"


def table_of(bench: dict[str, Any]) -> str:
    """Markdown: settings, machine and date, a row for each method, and speed by kind of prompt."""
    settings, machine, scores = bench["settings"], bench["machine"], bench["scores"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    warning = f"; {busy_warning(bench)}" if busy_warning(bench) else ""
    lines = [
        f"{bench['bundle']}, K = {settings['k']}, {len(bench['prompts'])} prompts of "
        f"{len({entry['category'] for entry in bench['prompts']})} kinds, at most {settings['max_new_tokens']} tokens, "
        f"{'greedy' if not settings['temperature'] else 'temperature ' + format(settings['temperature'], 'g')}; "
        f"{machine['cpu']}, {machine['threads']} threads; {versions}; {bench['created_utc'][:10]}{warning}:",
        "",
        "| method | tokens/s | decode only | x eager | x plain | accepted | same ids |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in scores:
        ratios = [_ratio(row, name) for name in ("eager", "plain")]
        rate = row["draft_acceptance_rate"]
        same = f"{row['equal_prompts']} of {row['num_prompts']}"
        decode = row["decode_tokens_per_s"]
        cells = [
            f"{row['tokens_per_s']:.1f}",
            f"{decode:.1f}" if decode else "",
            *ratios,
            f"{rate:.0%}" if rate else "",
            same,
        ]
        lines.append(f"| {row['method']} | " + " | ".join(cells) + " |")
    for row in scores:
        if row["draft_acceptance_rate"] is not None and (by_kind := row["ratio_by_category"].get("plain")):
            ordered = sorted(by_kind.items(), key=lambda item: -item[1])
            kinds = ", ".join(f"{name} {value:.2f}" for name, value in ordered)
            lines += ["", f"{row['method']}, times plain: {_mean(row)}{kinds}."]
    return "\n".join(lines)


def busy_warning(bench: dict[str, Any]) -> str | None:
    """A warning that the figures are unreliable, if other programs kept the machine busy."""
    busy = max(bench["machine"]["busy_percent_before"], bench["busy_percent_during"])
    return f"UNRELIABLE: other programs kept the CPU {busy:.0f} % busy" if busy > QUIET_PERCENT else None


def _ratio(row: dict[str, Any], name: str) -> str:
    if name not in row["ratio_to"]:
        return ""
    return with_interval(row["ratio_to"][name], None if row["method"] == name else row["interval_of"][name], unit="")


def _mean(row: dict[str, Any]) -> str:
    """The mean of the kinds. Files of older benches lack it."""
    if "plain" not in row.get("mean_of_categories", {}):
        return ""
    means = [row[key]["plain"] for key in ("mean_of_categories", "decode_mean_of_categories")]
    whole, alone = (with_interval(ratio, interval, unit="") for ratio, interval in means)
    return f"{whole} as the mean of the kinds, {alone} in decode; by kind "


def lines_around(mark: str) -> tuple[str, str]:
    """The lines before and after a table in a document."""
    return f"<!-- {mark} -->", f"<!-- /{mark} -->"


@click.command(cls=Tool)
@click.argument("bench", type=click.Path(path_type=Path))
@click.option("--write", "document", type=click.Path(path_type=Path), help="Replace the table in this document.")
@click.option("--mark", default=MARK, show_default=True, help="The word in the two lines around it.")
def main(bench: Path, document: Path | None, mark: str) -> None:
    """Print the table of BENCH, a file that 'specrt bench --json' wrote, or put it into a document."""
    try:
        table = table_of(json.loads(bench.read_text(encoding="utf-8-sig")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{bench}: not a file of 'specrt bench --json' ({type(error).__name__}: {error})") from error
    if document is None:
        click.echo(table)
        return
    text = document.read_text(encoding="utf-8")
    first, last = lines_around(mark)
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise UsageError(f"{document}: the lines {first} and {last} are missing; add them where the table belongs")
    write_text_file(document, f"{before}{first}\n{table}\n{last}{after}")


if __name__ == "__main__":
    run_process(lambda: main)
