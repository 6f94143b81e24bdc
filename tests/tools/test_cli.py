"""The commands as a user meets them: help, one line and a documented code for each error, clean standard output."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import specrt
from specrt.runtime.predictor import Target
from specrt.tools import acceptance, calibrate, demo, head_share, identity, overhead, readme_table, steps
from specrt.tools.cli import main

COMMANDS = ["export", "generate", "chat", "verify", "inspect", "fetch", "bench", "align", "plan"]
TOOLS = {
    "identity": identity.main,
    "demo": demo.main,
    "acceptance": acceptance.main,
    "head_share": head_share.main,
    "overhead": overhead.main,
    "steps": steps.main,
    "calibrate": calibrate.main,
    "readme_table": readme_table.main,
}
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


def test_the_version_is_told() -> None:
    assert invoke("--version").stdout == f"specrt, version {specrt.__version__}\n"


@pytest.mark.parametrize("command", [["generate", "--prompt", "x"], ["chat"], ["verify"], ["inspect"]])
def test_a_missing_bundle_exits_with_6(command: list[str], tmp_path: Path) -> None:
    result = invoke(*command, tmp_path / "none")
    assert result.exit_code == 6
    assert "no such bundle folder; make one with 'specrt export" in one_error_line(result)


@pytest.mark.parametrize("name", ["calibrate", "identity", "acceptance"])
def test_a_missing_bundle_exits_with_6_in_tools_too(name: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(TOOLS[name], [str(tmp_path / "none")])
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


@pytest.fixture(scope="module")
def expected(tiny_bundle: Path) -> Any:
    """What the library says, plainly decoded."""
    with specrt.load(tiny_bundle) as runtime:
        return runtime.generate(PROMPT, max_new_tokens=20, num_speculative_tokens=0)


Invoke = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def shell(tmp_path: Path) -> Invoke:
    """The command in a process of its own, away from the checkout."""

    def run(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "specrt.tools.cli", *map(str, arguments)]
        environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
        return subprocess.run(
            command, input=stdin, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
        )

    return run


def test_standard_output_has_the_text_and_nothing_else(tiny_bundle: Path, shell: Invoke, expected: Any) -> None:
    done = shell("generate", tiny_bundle, "--prompt", PROMPT, "--max-new-tokens", 20, "--stats")
    assert (done.returncode, done.stdout) == (0, expected.text + "\n")
    assert "mean acceptance length" in done.stderr


def test_a_quiet_run_says_nothing_on_standard_error(tiny_bundle: Path, shell: Invoke) -> None:
    done = shell("generate", tiny_bundle, "--prompt", PROMPT, "--max-new-tokens", 4)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_error_of_the_process_is_one_line(shell: Invoke) -> None:
    done = shell("generate", "none", "--prompt", PROMPT)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (6, "", 1)


@pytest.mark.parametrize("draft", ["ngram", "model", "none"])
def test_json_is_one_object_with_the_same_ids_for_every_draft(tiny_bundle: Path, expected: Any, draft: str) -> None:
    result = invoke("generate", tiny_bundle, "--prompt", PROMPT, "--max-new-tokens", 20, "--draft", draft, "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert list(data) == [
        "token_ids",
        "text",
        "finish_reason",
        "stop",
        "prompt_tokens",
        "completion_tokens",
        "logprobs",
        "settings",
        "stats",
    ]
    assert (data["stop"], data["logprobs"]) == (expected.stop, None)
    assert data["settings"]["temperature"] == {"value": 0.0, "source": "default"}
    assert data["settings"]["draft"] == {"value": draft, "source": "given"}
    assert (data["token_ids"], data["text"]) == (expected.token_ids, expected.text)
    metrics = {"mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "tokens_per_s", "rounds"}
    assert metrics <= set(data["stats"])


SAMPLED = ["--temperature", 0.8, "--top-k", 50, "--top-p", 0.95, "--min-p", 0.01, "--seed", 11]
SAMPLED += ["--repetition-penalty", 1.1, "--presence-penalty", 0.2, "--frequency-penalty", 0.1]
SAMPLED += ["--stop", "no such text", "--stop", "nor this", "--stop-token-id", 7, "--min-new-tokens", 2]


@pytest.mark.parametrize("draft", ["ngram", "model", "none"])
def test_sampling_options_are_those_of_the_library(tiny_bundle: Path, draft: str) -> None:
    """With a seed the text is the same for every draft."""
    with specrt.load(tiny_bundle) as runtime:
        library = runtime.generate(
            PROMPT,
            max_new_tokens=20,
            num_speculative_tokens=0,
            temperature=0.8,
            top_k=50,
            top_p=0.95,
            min_p=0.01,
            seed=11,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=0.1,
            stop=["no such text", "nor this"],
            stop_token_ids=[7],
            min_new_tokens=2,
            logprobs=3,
        )
    arguments = ["--prompt", PROMPT, "--max-new-tokens", 20, "--draft", draft, *SAMPLED, "--json", "--logprobs", 3]
    result = invoke("generate", tiny_bundle, *arguments)
    assert result.exit_code == 0, result.stderr
    data, wanted = json.loads(result.stdout), json.loads(json.dumps(library.as_dict()))
    by_draft = ("num_speculative_tokens", "is_adaptive", "draft", "rule")
    for name in ("token_ids", "text", "finish_reason", "stop", "logprobs"):
        assert data[name] == wanted[name], name
    for name in wanted["settings"].keys() - set(by_draft):
        assert data["settings"][name] == wanted["settings"][name], name


def test_the_effective_settings_are_told_on_standard_error(tiny_bundle: Path) -> None:
    result = invoke("generate", tiny_bundle, "--prompt", "a", "--max-new-tokens", 2, "--top-k", 1, "--verbose")
    assert result.exit_code == 0
    assert "effective settings" not in result.stdout
    rows = {name: (value, source) for name, value, source in re.findall(r"│ (\w+) +│ (.*?) +│ (.*?) +│", result.stderr)}
    assert rows["max_new_tokens"] == ("2", "given")
    assert rows["temperature"] == ("0.0", "default")


def test_a_chat_shows_the_log_probabilities_that_are_asked_for(tiny_bundle: Path) -> None:
    arguments = ("--max-new-tokens", 5, "--ignore-eos", "--logprobs", 2)
    result = invoke("chat", tiny_bundle, *arguments, stdin="Hello\n")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stderr.splitlines() if "  of  " in line]
    assert len(lines) == 5
    for line in lines:
        token, others = line.split("  of  ")
        logprobs = [float(part) for part in re.findall(r" (-?\d+\.\d{3})(?:,|$)", others)]
        assert len(logprobs) == 2 and logprobs == sorted(logprobs, reverse=True)
        assert token == others[: len(token)], "greedy: the most likely one"
    assert "  of  " not in invoke("chat", tiny_bundle, *arguments[:3], stdin="Hello\n").stderr


def test_a_chat_from_a_pipe_has_answers_on_standard_output_and_figures_beside_it(tiny_bundle: Path) -> None:
    """The second turn finds the first in the cache; what does not fit is told, and the chat goes on."""
    lines = ["Hello", "/stats", "", "And?", "x y " * 400, "/nonsense", "/reset", "Hello", "/exit", "never asked"]
    result = invoke("chat", tiny_bundle, "--max-new-tokens", 6, "--ignore-eos", stdin="\n".join(lines) + "\n")
    assert result.exit_code == 0, result.output
    figures = [line for line in result.stderr.splitlines() if line.startswith("6 tokens")]
    reused = [tuple(map(int, re.findall(r"(\d+) of (\d+) prompt tokens reused", line)[0])) for line in figures]
    assert len(figures) == 3
    assert reused[0][0] == 0
    assert reused[1][0] > reused[0][1]
    assert reused[2][1] == reused[0][1]
    assert "the bundle's context is 512" in result.stderr
    assert "/nonsense: no such command" in result.stdout
    with specrt.load(tiny_bundle) as runtime:
        answer = runtime.generate([{"role": "user", "content": "Hello"}], max_new_tokens=6, ignore_eos=True).text
    assert result.stdout.startswith(f"{answer}\n")
    assert result.stdout.count(answer) == 2


def test_verify_certifies_a_bundle(tiny_bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "certificate.json"
    result = invoke("verify", tiny_bundle, "--max-new-tokens", 8, "--output", file, "--json")
    assert result.exit_code == 0, result.output
    certificate = json.loads(result.stdout)
    assert certificate == json.loads(file.read_text())
    assert certificate["passed"] is True
    assert {check["passed"] for check in certificate["checks"]} == {True}


def test_verify_exits_with_1_and_names_what_failed(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that says another id after two drafted ones or more, which no rounding explains."""
    verify = Target.verify

    def forked(self: Target, committed: Sequence[int], drafted: Sequence[int], *more: bool) -> tuple[int, int]:
        accepted, token = verify(self, committed, drafted, *more)
        return (accepted, (token + 1) % 300) if len(drafted) > 1 else (accepted, token)

    monkeypatch.setattr(Target, "verify", forked)
    file = tmp_path / "certificate.json"
    result = invoke("verify", tiny_bundle, "--max-new-tokens", 8, "--output", file)
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("specrt: error: ")
    assert "checks failed: greedy: model, K = 2, greedy: model, K = 4" in last
    assert "greedy: model, K = 1," not in last
    assert json.loads(file.read_text())["passed"] is False


def test_a_certificate_that_cannot_be_written_is_told_before_any_check(tiny_bundle: Path, tmp_path: Path) -> None:
    result = invoke("verify", tiny_bundle, "--output", tmp_path / "no" / "file")
    assert result.exit_code == 2
    assert "the certificate cannot be written there" in one_error_line(result)


def test_ctrl_c_exits_with_130_and_one_line(tiny_bundle: Path, tmp_path: Path) -> None:
    """While the prompt is awaited from a pipe: the test's end opens when the command has opened its own."""
    fifo = tmp_path / "prompt"
    os.mkfifo(fifo)
    command = [sys.executable, "-m", "specrt.tools.cli", "generate", str(tiny_bundle), "--prompt-file", str(fifo)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process, fifo.open("w"):
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors.strip()) == (130, "", "specrt: interrupted")


def test_a_dash_reads_the_prompt_from_standard_input(tiny_bundle: Path, expected: Any) -> None:
    result = invoke("generate", tiny_bundle, "--prompt", "-", "--max-new-tokens", 20, "--json", stdin=PROMPT)
    assert json.loads(result.stdout)["token_ids"] == expected.token_ids


def test_a_prompt_file_is_taken_as_it_is(tiny_bundle: Path, tmp_path: Path, expected: Any) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    result = invoke("generate", tiny_bundle, "--prompt-file", file, "--max-new-tokens", 20, "--json")
    assert json.loads(result.stdout)["token_ids"] == expected.token_ids


def test_messages_go_through_the_chat_template(tiny_bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "messages.json"
    messages = [{"role": "user", "content": "Hello"}]
    file.write_text(json.dumps(messages))
    result = invoke("generate", tiny_bundle, "--messages", file, "--max-new-tokens", 3, "--json")
    with specrt.load(tiny_bundle) as runtime:
        assert json.loads(result.stdout)["prompt_tokens"] == len(runtime.codec.encode(messages))


def test_inspect_prints_tables_or_one_object(tiny_bundle: Path) -> None:
    assert "target" in invoke("inspect", tiny_bundle).stdout
    data = json.loads(invoke("inspect", tiny_bundle, "--json", "--check").stdout)
    assert (data["num_speculative_tokens"], data["draft"]["kind"]) == (4, "self")
    assert data["derived"]["target"]["kv_bytes_per_sequence"] > 0


def test_identity_finds_every_way_equal(tiny_bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "identity.json"
    options = ["--max-new-tokens", "12", "--k", "1,4", "--prompts", "2", "--json", str(file)]
    result = CliRunner().invoke(identity.main, [str(tiny_bundle), *options])
    assert result.exit_code == 0, result.output
    checks = json.loads(file.read_text())["checks"]
    ways = [("none", 0), ("ngram", 1), ("ngram", 4), ("model", 1), ("model", 4)]
    assert [(check["draft"], check["k"], check["num_equal"]) for check in checks] == [(*way, 2) for way in ways]


def test_identity_exits_with_1_on_a_fork(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "eager_ids", lambda bundle, ids, ways, advance: [(1, 2)] * len(ids))
    options = ["--max-new-tokens", "2", "--k", "4", "--drafts", "ngram", "--prompts", "1"]
    result = CliRunner().invoke(identity.main, [str(tiny_bundle), *options])
    assert result.exit_code == 1
    assert re.search(r"^ngram, K = 4 forks in chat, position \d: expected id \d", result.stdout, re.MULTILINE)
    told = result.stderr.splitlines()
    assert told[:2] == ["plain: 0 of 1 prompts the same", "ngram, K = 4: 0 of 1 prompts the same"]
    assert told[2].startswith("specrt: error: 2 of 2 texts are not the target's own")
    assert len(told) == 3


@pytest.mark.parametrize("options", [["--k", "5"], ["--k", "0"], ["--k", "a"], ["--drafts", "oracle"]])
def test_identity_refuses_what_the_bundle_does_not_have(tiny_bundle: Path, options: list[str]) -> None:
    result = CliRunner().invoke(identity.main, [str(tiny_bundle), *options])
    assert result.exit_code == 2
    assert "this bundle" in one_error_line(result)
