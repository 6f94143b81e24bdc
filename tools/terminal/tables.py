"""Tables of figures."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table


def figures_table(title: str | None, headings: Sequence[str], rows: Sequence[Sequence[str]] = ()) -> Table:
    """A table with names in its first column, and figures, which are right-justified, in the others. No markup."""
    table = Table(title=title, title_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left")
    for row in rows:
        table.add_row(*map(escape, row))
    return table
