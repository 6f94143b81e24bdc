"""The commands as a user meets them: help, and one line and a documented code for each error."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

import specrt
from specrt.tools.cli import main
from specrt.tools.lab import demo, models, overhead, soak, steps
from specrt.tools.plan import calibrate
from specrt.tools.report import readme_table
from tests.tools.commands import invoke, one_error_line

COMMANDS = ["export", "generate", "chat", "verify", "inspect", "bench", "align", "plan", "serve"]
TOOLS = {
    "demo": demo.main,
    "models": models.main,
    "overhead": overhead.main,
    "steps": steps.main,
    "soak": soak.main,
    "calibrate": calibrate.main,
    "readme_table": readme_table.main,
}


def test_the_group_lists_its_commands() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    assert set(COMMANDS) <= set(re.findall(r"^  ([a-z-]+)  ", result.stdout, re.MULTILINE))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_option_has_a_help_text(command: str) -> None:
    result = invoke(command, "-h")
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: ")
    parsed = main.commands[command]
    assert parsed.help
    options = [parameter for parameter in parsed.params if parameter.param_type_name == "option"]
    assert [option.name for option in options if not getattr(option, "help", None)] == []


@pytest.mark.parametrize("name", TOOLS)
def test_every_tool_has_a_help_text(name: str) -> None:
    result = CliRunner().invoke(TOOLS[name], ["--help"])
    assert result.exit_code == 0
    assert TOOLS[name].help


def test_the_version_is_printed() -> None:
    assert invoke("--version").stdout == f"specrt, version {specrt.__version__}\n"


@pytest.mark.parametrize("command", [["generate", "--prompt", "x"], ["chat"], ["verify"], ["inspect"], ["serve"]])
def test_a_missing_bundle_exits_with_6(command: list[str], tmp_path: Path) -> None:
    result = invoke(*command, tmp_path / "none")
    assert result.exit_code == 6
    assert "no such bundle folder; make one with 'specrt export" in one_error_line(result)


def test_a_missing_bundle_exits_with_6_in_tools_too(tmp_path: Path) -> None:
    result = CliRunner().invoke(calibrate.main, [str(tmp_path / "none")])
    assert result.exit_code == 6
    assert "no such bundle folder" in one_error_line(result)


def test_a_missing_source_exits_with_3(tmp_path: Path) -> None:
    result = invoke("export", tmp_path / "none.gguf", "-o", tmp_path / "bundle")
    assert result.exit_code == 3
    assert list(tmp_path.iterdir()) == []


USAGE_ERRORS: dict[str, tuple[list[str], str]] = {
    "no prompt": ([], "prompt: got 0 of --prompt, --prompt-file and --messages, expected exactly one"),
    "two prompts": (["--prompt", "a", "--prompt-file", "b"], "prompt: got 2 of"),
    "an empty prompt": (["--prompt", ""], "prompt: got no tokens"),
    "K above the bundle's": (["--prompt", "a", "-k", "5"], "got 5, this bundle was exported for 0 to 4"),
    "negative K": (["--prompt", "a", "-k", "-1"], "got -1"),
    "negative limit": (["--prompt", "a", "--max-new-tokens", "-1"], "max_new_tokens: got -1"),
    "a prompt beyond the context": (["--prompt", "x y " * 300], "the bundle's context is 512"),
    "a temperature below 0": (
        ["--prompt", "a", "--temperature", "-0.1"],
        "temperature: got -0.1, expected a number from",
    ),
    "top-k beyond its range": (["--prompt", "a", "--top-k", "2000"], "top_k: got 2000"),
    "top-p beyond 1": (["--prompt", "a", "--top-p", "1.5"], "top_p: got 1.5"),
    "min-p below 0": (["--prompt", "a", "--min-p", "-1"], "min_p: got -1"),
    "a negative seed": (["--prompt", "a", "--seed", "-1"], "seed: got -1"),
    "no repetition at all": (["--prompt", "a", "--repetition-penalty", "0"], "repetition_penalty: got 0.0"),
    "a large penalty": (["--prompt", "a", "--presence-penalty", "101"], "presence_penalty: got 101"),
    "more to come than may": (["--prompt", "a", "--min-new-tokens", "300"], "min_new_tokens: got 300"),
    "an empty stop": (["--prompt", "a", "--stop", ""], "stop: string 0 is empty"),
    "an id that is none": (
        ["--prompt", "a", "--stop-token-id", "320"],
        "stop_token_ids: got 320, expected ids in 0..319",
    ),
    "a rule for drafts that are not sampled": (
        ["--prompt", "a", "--temperature", "1", "--draft", "ngram", "--rule", "block"],
        "rule: got 'block', but ngram drafts are not sampled",
    ),
    "log-probabilities in a stream": (["--prompt", "a", "--logprobs", "2"], "add --json"),
    "too many log-probabilities": (["--prompt", "a", "--json", "--logprobs", "21"], "logprobs: got 21"),
    "no prompt file": (["--prompt-file", "none.txt"], "none.txt: cannot be read as text"),
    "no messages file": (["--messages", "none.json"], "none.json: cannot be read as text"),
}


@pytest.mark.parametrize(("arguments", "expected"), USAGE_ERRORS.values(), ids=USAGE_ERRORS)
def test_usage_errors_exit_with_2(tiny_bundle: Path, arguments: list[str], expected: str) -> None:
    result = invoke("generate", tiny_bundle, *arguments)
    assert result.exit_code == 2
    assert expected in one_error_line(result)


MESSAGES: dict[str, tuple[bytes, str]] = {
    "not text": (b"\xff\xfe", "cannot be read as text"),
    "not JSON": (b"[{", "not JSON"),
    "an object": (b'{"role": "user"}', "got dict, expected a list"),
    "a list of strings": (b'["a"]', "expected a list of"),
    "no role": (b'[{"content": "a"}]', "message 0"),
    "an empty list": (b"[]", "prompt: got no tokens"),
}


@pytest.mark.parametrize(("content", "expected"), MESSAGES.values(), ids=MESSAGES)
def test_unreadable_messages_exit_with_2(tiny_bundle: Path, tmp_path: Path, content: bytes, expected: str) -> None:
    file = tmp_path / "messages.json"
    file.write_bytes(content)
    result = invoke("generate", tiny_bundle, "--messages", file)
    assert result.exit_code == 2
    assert expected in one_error_line(result)


def test_an_unknown_backend_exits_with_9(tiny_bundle: Path) -> None:
    result = invoke("generate", tiny_bundle, "--prompt", "a", "--backend", "abacus")
    assert result.exit_code == 9
    assert "backend abacus" in one_error_line(result)


@pytest.mark.parametrize("arguments", [["--draft", "crystal-ball"], ["-k", "many"], ["--threads", "0"], ["--nonsense"]])
def test_what_click_refuses_exits_with_2(tiny_bundle: Path, arguments: Sequence[str]) -> None:
    result = invoke("generate", tiny_bundle, "--prompt", "a", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr


def test_a_damaged_bundle_exits_with_6(tiny_bundle: Path, tmp_path: Path) -> None:
    manifest = json.loads((tiny_bundle / "bundle.json").read_text())
    (tmp_path / "bundle.json").write_text(json.dumps({**manifest, "schema_version": 0}))
    result = invoke("inspect", tmp_path)
    assert result.exit_code == 6
    assert "schema version 0" in one_error_line(result)
