"""What the README asks a reader to type is run here, on a tiny pair."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import save_tiny_model

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a tiny model stands for the README's."""
    root = tmp_path_factory.mktemp("readme")
    save_tiny_model(root / MODEL)
    return root


def test_commands_and_code_of_the_readme(place: Path) -> None:
    begins = {"": "specrt ", "console": "$ specrt "}
    lines = [(begins[kind], line) for kind, text in BLOCKS if kind in begins for line in text.splitlines()]
    commands = [line.removeprefix("$ ") for begin, line in lines if line.startswith(begin)]
    names = [shlex.split(command)[1] for command in commands]
    assert names == ["export", "generate", "verify", "generate", "chat", "tune", "inspect"]
    assert MODEL in commands[0]
    for command in commands:
        arguments = shlex.split(command, comments=True)[1:]
        done = subprocess.run(
            [sys.executable, "-m", "specrt.tools.cli", *arguments],
            cwd=place,
            capture_output=True,
            text=True,
            check=False,
            input="Hello\n",
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        assert done.stdout.strip()
    (code,) = (text for kind, text in BLOCKS if kind == "python")
    done = subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert " length " in done.stdout or " stop " in done.stdout


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"make ([a-z-]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert {"demo", "test"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
