"""What is left of a progress on standard error where that is no terminal: notes, and each step's time."""

from __future__ import annotations

import re

import pytest

from specrt.engines.progress import Progress
from specrt.tools.terminal.progress import shown_progress, shown_steps


def work(progress: Progress) -> None:
    progress.step("reading", total=2)
    progress.advance(2)
    progress.note("half [bold]done[/bold]")
    progress.step("writing")


def test_a_bar_by_step_leaves_notes_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_progress() as progress:
        work(progress)
    out, err = capsys.readouterr()
    expected = r"half \[bold\]done\[/bold\]\nreading: \d+\.\d s\nwriting: \d+\.\d s\n"
    assert out == "" and re.fullmatch(expected, err), err


def test_a_bar_of_steps_leaves_notes(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_steps(2) as progress:
        work(progress)
    assert capsys.readouterr() == ("", "half [bold]done[/bold]\n")
