"""The Containerfile: what it copies, installs and runs exists here."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from click import Command, Context
from click.testing import CliRunner

from specrt.tools.cli import main

ROOT = Path(__file__).resolve().parent.parent
TABLE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = TABLE["project"]["optional-dependencies"]


@pytest.fixture(scope="module")
def stages() -> list[list[tuple[str, str]]]:
    """(instruction, arguments) of each stage; before the first FROM is the first entry."""
    text = (ROOT / "Containerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    stages: list[list[tuple[str, str]]] = [[]]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, arguments = line.partition(" ")
        if name == "FROM":
            stages.append([])
        stages[-1].append((name, arguments))
    return stages


def test_the_device_is_an_argument_and_its_extras_exist(stages: list[list[tuple[str, str]]]) -> None:
    build = stages[1]
    assert ("ARG", "DEVICE=cpu") in build
    (install,) = (arguments for name, arguments in build if name == "RUN")
    (extras,) = re.findall(r'"\.\[(.*?)\]"', install)
    assert extras == "${DEVICE},serve"
    assert {"cpu", "gpu", "serve"} <= set(EXTRAS)
    assert "-c constraints.txt" in install


def test_all_that_the_wheel_needs_is_copied(stages: list[list[tuple[str, str]]]) -> None:
    copied = {name for kind, arguments in stages[1] if kind == "COPY" for name in arguments.split()[:-1]}
    assert all((ROOT / name).exists() for name in copied)
    folders = {folder.split("/")[0] for folder in TABLE["tool"]["setuptools"]["package-dir"].values()}
    files = {"pyproject.toml", "constraints.txt", TABLE["project"]["readme"], *TABLE["project"]["license-files"]}
    assert copied == folders | files


def test_the_image_serves_as_a_user_with_a_health_check(stages: list[list[tuple[str, str]]]) -> None:
    final = dict(stages[-1])
    users = [arguments for name, arguments in stages[-1] if name == "USER"]
    assert users == ["10001"] and f"useradd --uid {users[0]}" in final["RUN"]
    program, name, *arguments = json.loads(final["ENTRYPOINT"])
    assert program in TABLE["project"]["scripts"] and isinstance(main.commands[name], Command)
    # Below the group, whose names of the help option a command keeps from its first use on; options may follow.
    group = Context(main, info_name="specrt", **main.context_settings)
    context = main.commands[name].make_context(name, [*arguments, "--reproducible"], parent=group)
    assert (str(context.params["bundle"]), context.params["host"]) == ("/bundle", "0.0.0.0")
    check = json.loads(final["HEALTHCHECK"].partition("CMD ")[2])
    (url,) = re.findall(r"'(http://.*?)'", check[-1])
    assert url == f"http://127.0.0.1:{context.params['port']}/health" and final["EXPOSE"] == str(context.params["port"])
    assert CliRunner().invoke(main, [name, *arguments]).exit_code == 6  # no bundle is mounted


def test_the_commands_at_its_top_name_what_it_has(stages: list[list[tuple[str, str]]]) -> None:
    text = (ROOT / "Containerfile").read_text(encoding="utf-8")
    arguments = {arguments.partition("=")[0] for stage in stages for name, arguments in stage if name == "ARG"}
    for line in re.findall(r"^#   (docker .*)$", text, re.MULTILINE):
        words = shlex.split(line, comments=True)
        assert words[:2] in (["docker", "build"], ["docker", "run"])
        given = [word.partition("=")[0] for previous, word in itertools.pairwise(words) if previous == "--build-arg"]
        assert set(given) <= arguments
