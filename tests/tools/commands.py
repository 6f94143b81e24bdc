"""What tests of the command line share: a command run in this process, and its one line of error."""

from __future__ import annotations

from click.testing import CliRunner, Result

from specrt.tools.cli import main

PROMPT = "The quick brown fox"


def invoke(*arguments: object, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)


def one_error_line(result: Result) -> str:
    """The error's line, after a check that it is all there is."""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("specrt: error: ")
    assert result.stdout == ""
    assert isinstance(result.exception, SystemExit)
    return lines[0]
