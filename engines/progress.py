"""How long work (an export, a build) reports what it is doing. The command line shows it; the default says nothing."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """``step`` opens a step that counts to ``total`` (None: unknown), ``advance`` moves it, ``note`` is one line."""

    def step(self, name: str, total: int | None = None) -> None: ...

    def advance(self, amount: int) -> None: ...

    def note(self, line: str) -> None: ...


class Silent:
    """The default."""

    def step(self, name: str, total: int | None = None) -> None:
        return

    def advance(self, amount: int) -> None:
        return

    def note(self, line: str) -> None:
        return
