"""Tables of figures show what they are given."""

from __future__ import annotations

import io

from rich.console import Console

from specrt.tools.terminal.tables import figures_table


def test_cells_are_no_markup() -> None:
    """A token or a category of a user may look like markup."""
    console = Console(file=io.StringIO(), width=80)
    console.print(figures_table("times", ["token", "n"], [("[bold]a", "1"), ("[/b]", "22")]))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[bold]a │  1" in shown and "[/b]    │ 22" in shown
