"""A progress that keeps what it gets, and may be interrupted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class KeptProgress:
    """``on_step`` is called with the name of each step before it is kept."""

    on_step: Callable[[str], None] = lambda name: None
    steps: list[str] = field(default_factory=list)
    totals: list[int | None] = field(default_factory=list)
    amounts: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def step(self, name: str, total: int | None = None) -> None:
        self.on_step(name)
        self.steps.append(name)
        self.totals.append(total)

    def advance(self, amount: int) -> None:
        self.amounts.append(amount)

    def note(self, line: str) -> None:
        self.notes.append(line)


def interrupted_at(step: str) -> KeptProgress:
    """Raises ``KeyboardInterrupt``, as Ctrl-C does, when ``step`` begins."""

    def stop(name: str) -> None:
        if name == step:
            raise KeyboardInterrupt

    return KeptProgress(stop)
