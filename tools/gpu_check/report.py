"""The files of ``specrt gpu-check``: one JSON object and one page, written whole."""

from __future__ import annotations

import json
from pathlib import Path

from specrt.engines.errors import UsageError
from specrt.engines.storage.files import check_writable, write_text_file
from specrt.tools.gpu_check.check import Report
from specrt.tools.gpu_check.experiment import CRASHED, FAILED, PASSED, SKIPPED, TIMED_OUT
from specrt.tools.gpu_check.page import page

DEFAULT_OUTPUT = "gpu-check.json"


def check_output(output: Path) -> Path:
    """The page's path for the JSON file ``output``. Raises ``UsageError`` or ``ResourceError`` before any work."""
    if output.suffix != ".json":
        raise UsageError(f"--output {output}: expected a name that ends in .json; the page is next to it in .md")
    markdown = output.with_suffix(".md")
    for path in (output, markdown):
        check_writable(path, "choose another file", "the report")
    return markdown


def write_report(report: Report, output: Path) -> None:
    """Write ``output`` and its page."""
    write_text_file(output, json.dumps(report.as_dict(), indent=1) + "\n")
    write_text_file(output.with_suffix(".md"), page(report))


def summary(report: Report, output: Path) -> str:
    """One line: how many of which verdict, and where the report is."""
    counts = [(verdict, len(report.named(verdict))) for verdict in (PASSED, FAILED, CRASHED, TIMED_OUT, SKIPPED)]
    counted = ", ".join(f"{number} {verdict}" for verdict, number in counts if number)
    return f"{len(report.outcomes)} experiments: {counted}; {output} and {output.with_suffix('.md')}"
