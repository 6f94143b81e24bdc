"""The README's output: of commands that ran, put where it belongs, and left alone when one fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrt.engines.errors import SpecrtError, UsageError
from specrt.tools.lab.readme import FIRST_LINES, MOST_LINES, commands_of, cut, runner, with_output

DOCUMENT = "a\n<!-- commands -->\n```console\n$ pip install -q x\n$ specrt --version\nold\n```\n<!-- /commands -->\nz\n"


def test_the_output_of_commands_replaces_the_old_one(tmp_path: Path) -> None:
    once = with_output(DOCUMENT, runner(tmp_path), "A note.")
    block = once.partition("```console\n")[2].partition("```")[0].splitlines()
    assert block[:2] == ["$ pip install -q x", "$ specrt --version"] and block[2].startswith("specrt")
    assert len(block) == 3 and "old" not in once
    assert once.startswith("a\n<!-- commands -->\n") and once.endswith("A note.\n<!-- /commands -->\nz\n")
    assert with_output(once, runner(tmp_path), "A note.") == once


def test_a_command_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SpecrtError, match="specrt inspect nowhere: ended with 6"):
        with_output(DOCUMENT.replace("--version", "inspect nowhere"), runner(tmp_path), "")


def test_a_document_without_commands_is_refused() -> None:
    for document in ("a\n", DOCUMENT.replace("$ ", "")):
        with pytest.raises(UsageError, match="got no commands between"):
            with_output(document, lambda command: "", "")
    assert commands_of("$ a\nb $ c\n$ d\n") == ["a", "d"]


def test_the_middle_of_a_long_output_is_left_out_and_counted() -> None:
    lines = [str(number) for number in range(MOST_LINES + 1)]
    assert cut(lines[:-1]) == lines[:-1]
    found = cut(lines)
    assert found[:FIRST_LINES] == lines[:FIRST_LINES] and found[-1] == lines[-1]
    assert found[FIRST_LINES:-1] == [f"[{MOST_LINES - FIRST_LINES} lines left out here]"]
