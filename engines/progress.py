"""Progress reports of long work (an export, a build, a bench). The parameter is always named ``progress``.

The command line shows it (``specrt.tools.terminal.progress``); the default is ``SILENT``.
"""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """``step`` begins a step that counts to ``total`` (None: unknown), ``advance`` moves it, ``note`` is one line."""

    def step(self, name: str, total: int | None = None) -> None: ...

    def advance(self, amount: int) -> None: ...

    def note(self, line: str) -> None: ...


class Silent:
    """Shows no progress."""

    def step(self, name: str, total: int | None = None) -> None:
        return

    def advance(self, amount: int) -> None:
        return

    def note(self, line: str) -> None:
        return


SILENT = Silent()
