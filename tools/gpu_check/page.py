"""The report of ``specrt gpu-check`` as one page of Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specrt.tools.gpu_check.check import Outcome, Report


def page(report: Report) -> str:
    """A table of verdicts, then the raw figures of each experiment that recorded some."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield "# specrt gpu-check"
    yield ""
    gpu = report.gpu
    where = f"{gpu['name']}, compute capability {gpu['compute capability']}" if gpu else f"no GPU ({report.no_gpu})"
    yield f"{where}. specrt {report.specrt}, Python {report.python}, {report.system}, {report.created_utc}, "
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    yield f"{report.seconds:.0f} s in all. {versions}."
    yield ""
    yield "| experiment | question | verdict | s | reason |"
    yield "|---|---|---|---|---|"
    for outcome in report.outcomes:
        cells = (outcome.name, outcome.question, outcome.verdict, f"{outcome.seconds:.1f}", outcome.reason)
        yield f"| {' | '.join(_cell(cell) for cell in cells)} |"
    for outcome in report.outcomes:
        if outcome.figures:
            yield from _figures(outcome)


def _figures(outcome: Outcome) -> Iterator[str]:
    yield ""
    yield f"## {outcome.name}"
    yield ""
    yield "| figure | value |"
    yield "|---|---|"
    for name, value in _flat(outcome.figures):
        yield f"| {_cell(name)} | {_cell(value)} |"


def _flat(figures: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}: ")
        else:
            yield f"{prefix}{name}", f"{value:.6g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
