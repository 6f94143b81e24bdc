"""``specrt generate`` and ``chat``: clean standard output, JSON, the settings in force, prompts from everywhere."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import specrt
from tests.tools.commands import PROMPT, invoke


@pytest.fixture(scope="module")
def expected(tiny_bundle: Path) -> Any:
    """The library's text by plain decoding."""
    with specrt.load(tiny_bundle) as runtime:
        return runtime.generate(PROMPT, max_new_tokens=20, num_speculative_tokens=0)


Invoke = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def shell(tmp_path: Path) -> Invoke:
    """The command in a separate process, outside the checkout."""

    def run(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "specrt.tools.cli", *map(str, arguments)]
        environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
        return subprocess.run(
            command, input=stdin, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
        )

    return run


def test_standard_output_has_the_text_and_nothing_else(tiny_bundle: Path, shell: Invoke, expected: Any) -> None:
    done = shell("generate", tiny_bundle, "--raw", "--prompt", PROMPT, "--max-new-tokens", 20, "--stats")
    assert (done.returncode, done.stdout) == (0, expected.text + "\n")
    for figure in ("mean acceptance length", "first token ms", "peak RSS MB", "load s"):
        assert figure in done.stderr


def test_a_quiet_run_has_one_note_on_standard_error(tiny_bundle: Path, shell: Invoke) -> None:
    done = shell("generate", tiny_bundle, "--raw", "--prompt", PROMPT, "--max-new-tokens", 4)
    assert (done.returncode, done.stderr) == (0, "specrt: the prompt is plain text (--raw)\n")


def test_an_error_of_the_process_is_one_line(shell: Invoke) -> None:
    done = shell("generate", "none", "--prompt", PROMPT)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (6, "", 1)


@pytest.mark.parametrize("draft", ["ngram", "model", "none"])
def test_json_is_one_object_with_the_same_ids_for_every_draft(tiny_bundle: Path, expected: Any, draft: str) -> None:
    arguments = ["--raw", "--prompt", PROMPT, "--max-new-tokens", 20, "--draft", draft, "--json"]
    result = invoke("generate", tiny_bundle, *arguments)
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert list(data) == [
        "prompt_kind",
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
    arguments = ["--raw", "--prompt", PROMPT, "--max-new-tokens", 20, "--draft", draft, *SAMPLED]
    result = invoke("generate", tiny_bundle, *arguments, "--json", "--logprobs", 3)
    assert result.exit_code == 0, result.stderr
    data, wanted = json.loads(result.stdout), json.loads(json.dumps(library.as_dict()))
    by_draft = ("num_speculative_tokens", "is_adaptive", "draft", "rule")
    for name in ("token_ids", "text", "finish_reason", "stop", "logprobs"):
        assert data[name] == wanted[name], name
    for name in wanted["settings"].keys() - set(by_draft):
        assert data["settings"][name] == wanted["settings"][name], name


def test_the_effective_settings_are_printed_on_standard_error(tiny_bundle: Path) -> None:
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


def test_a_chat_from_a_pipe_has_answers_on_standard_output_and_figures_next_to_it(tiny_bundle: Path) -> None:
    """The second turn finds the first in the cache; what does not fit is reported, and the chat continues."""
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
