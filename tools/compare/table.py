"""What ``specrt compare`` prints."""

from __future__ import annotations

from specrt.tools.compare.compare import Comparison

_HEAD = ("graph", "output", "passes", "largest difference", "tolerance", "verdict")


def lines_of(comparison: Comparison) -> list[str]:
    """A line for each output in columns, and the notes."""
    rows = [_HEAD]
    for result in comparison.results:
        figures = (str(result.passes), f"{result.max_abs_difference:.3g}", f"{result.tolerance:.3g}")
        rows.append((result.graph, result.output, *figures, "passed" if result.passed else "FAILED"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [f"{comparison.first} against {comparison.second}", *table, *comparison.notes]
