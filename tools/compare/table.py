"""What ``specrt compare`` prints."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from specrt.tools.compare.compare import Comparison


def print_comparison(comparison: Comparison) -> None:
    """A table with a row for each output, and the notes."""
    console = Console()
    console.print(f"{comparison.first} against {comparison.second}", highlight=False, markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for column in ("graph", "output", "passes", "largest difference", "tolerance", ""):
        table.add_column(column, justify="left" if column in ("graph", "output", "") else "right")
    for result in comparison.results:
        figures = (str(result.passes), f"{result.max_abs_difference:.3g}", f"{result.tolerance:.3g}")
        table.add_row(result.graph, result.output, *figures, "passed" if result.passed else "FAILED")
    console.print(table)
    for note in comparison.notes:
        console.print(note, highlight=False, markup=False, soft_wrap=True)
