"""The setting is added only where it helps, never over the user's own; a restarted command does not restart again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specrt.tools.terminal.hugepages import SETTING, VARIABLE, environment


@pytest.mark.parametrize(
    ("mode", "added"), [("always [madvise] never\n", True), ("[always] madvise never\n", False), ("x [never]\n", False)]
)
def test_added_where_linux_gives_huge_pages_on_request(mode: str, added: bool, tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text(mode)
    assert environment({"A": "b"}, tmp_path / "enabled") == {"A": "b", **({VARIABLE: SETTING} if added else {})}


def test_left_alone_without_the_file_or_with_a_setting_of_the_users(tmp_path: Path) -> None:
    assert environment({"A": "b"}, tmp_path / "nothing") == {"A": "b"}
    (tmp_path / "enabled").write_text("[madvise]")
    assert environment({VARIABLE: "x=1"}, tmp_path / "enabled") == {VARIABLE: "x=1"}


def test_a_command_restarts_once_and_keeps_its_arguments() -> None:
    code = (
        "import sys; from specrt.tools.terminal.hugepages import restart_with_huge_pages as r; r(); print(sys.argv[1:])"
    )
    env = {name: value for name, value in os.environ.items() if name != VARIABLE}
    command = [sys.executable, "-c", code, "a b", "--c"]
    output = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60).stdout
    assert output == "['a b', '--c']\n"
