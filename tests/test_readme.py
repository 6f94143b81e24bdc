"""Runs the commands of the README on a tiny pair."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.exports import Exports
from tests.tools.commands import invoke

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_commands_and_code_of_the_readme(
    exports: Exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder in which a tiny model stands for the README's, in this process."""
    (tmp_path / MODEL).parent.mkdir()
    (tmp_path / MODEL).symlink_to(exports.model())
    monkeypatch.chdir(tmp_path)
    begins = {"": "specrt ", "console": "$ specrt "}
    lines = [(begins[kind], line) for kind, text in BLOCKS if kind in begins for line in text.splitlines()]
    commands = [line.removeprefix("$ ") for begin, line in lines if line.startswith(begin)]
    names = [shlex.split(command)[1] for command in commands]
    assert names == ["export", "generate", "verify", "generate", "chat", "tune", "inspect", "serve"]
    assert MODEL in commands[0]
    for command in commands[:-1]:
        arguments = shlex.split(command, comments=True)[1:]
        done = invoke(*arguments, stdin="Hello\n")
        assert done.exit_code == 0, f"{command}: {done.stderr}"
        assert done.stdout.strip()
    code, client = (text for kind, text in BLOCKS if kind == "python")
    exec(code, {})
    shown = capsys.readouterr().out
    assert " length " in shown or " stop " in shown
    check_server(shlex.split(commands[-1], comments=True)[1:], client, tmp_path)


def check_server(arguments: list[str], client: str, place: Path) -> None:
    """The README's server, on a free port, answers the README's client, and ends with 0 at SIGTERM."""
    command = [sys.executable, "-m", "specrt.tools.cli", *arguments, "--port", "0"]
    with subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        found = re.search(r"http://127.0.0.1:(\d+)/v1", server.stdout.readline())
        assert found is not None and "http://127.0.0.1:8000/v1" in client
        code = client.replace("8000", found[1])
        done = subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True, text=True, check=False)
        server.terminate()
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
        assert server.wait(30) == 0


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"make ([a-z-]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert {"demo", "test"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
