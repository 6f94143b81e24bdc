"""Prompts on the command line: messages or plain text, from everywhere, with what a chat template may get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import specrt
from specrt.runtime.runtime import Runtime
from tests.tools.commands import PROMPT, invoke, one_error_line

USER = [{"role": "user", "content": PROMPT}]
SYSTEM = [{"role": "system", "content": "Be brief."}, *USER]
ANSWERED = [*USER, {"role": "assistant", "content": "It jumps"}]
FEW = ["--max-new-tokens", 3, "--json"]
RAW_NOTE = "specrt: the prompt is plain text (--raw)\n"
MESSAGE_NOTE = "specrt: the prompt is a user message in the bundle's chat template; --raw is plain text\n"


@pytest.fixture(scope="module")
def runtime(tiny_bundle: Path) -> Any:
    with specrt.load(tiny_bundle) as opened:
        yield opened


@pytest.fixture(scope="module")
def plain_bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny bundle without its chat template."""
    folder = tmp_path_factory.mktemp("plain") / "bundle"
    folder.mkdir()
    for file in tiny_bundle.iterdir():
        (folder / file.name).symlink_to(file)
    manifest = json.loads((tiny_bundle / "bundle.json").read_text())
    manifest["tokenizer"]["chat_template"] = None
    (folder / "bundle.json").unlink()
    (folder / "bundle.json").write_text(json.dumps(manifest))
    return folder


def generated(bundle: Path, *arguments: object, stdin: str | bytes | None = None) -> tuple[dict[str, Any], str]:
    """(the JSON object, standard error) of a short generation."""
    result = invoke("generate", bundle, *arguments, *FEW, stdin=stdin)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), result.stderr


def expected(runtime: Runtime, prompt: Any, **options: Any) -> list[int]:
    return runtime.generate(prompt, max_new_tokens=3, **options).token_ids


def is_answer(data: dict[str, Any], runtime: Runtime, prompt: Any, **options: Any) -> bool:
    result = runtime.generate(prompt, max_new_tokens=3, **options)
    return bool((data["token_ids"], data["prompt_tokens"]) == (result.token_ids, result.stats.prompt_tokens))


def test_a_prompt_is_a_user_message_and_raw_is_plain_text(tiny_bundle: Path, runtime: Runtime) -> None:
    data, note = generated(tiny_bundle, "--prompt", PROMPT)
    assert is_answer(data, runtime, USER) and not is_answer(data, runtime, PROMPT)
    assert (data["prompt_kind"], note) == ("messages", MESSAGE_NOTE)
    data, note = generated(tiny_bundle, "--prompt", PROMPT, "--raw")
    assert is_answer(data, runtime, PROMPT)
    assert (data["prompt_kind"], note) == ("text", RAW_NOTE)


def test_a_bundle_without_a_template_takes_plain_text(plain_bundle: Path, runtime: Runtime) -> None:
    data, note = generated(plain_bundle, "--prompt", PROMPT)
    assert is_answer(data, runtime, PROMPT)
    assert note == "specrt: the prompt is plain text (the bundle has no chat template)\n"
    error = one_error_line(invoke("generate", plain_bundle, "--prompt", PROMPT, "--system", "Be brief."))
    assert "--system: the bundle has no chat template" in error
    error = one_error_line(invoke("generate", plain_bundle, "--prompt", PROMPT, "--chat-template-kwargs", '{"x": 1}'))
    assert "chat_template_kwargs: only for lists of messages" in error


def test_a_system_message_goes_before_the_prompt(tiny_bundle: Path, runtime: Runtime, tmp_path: Path) -> None:
    data, _ = generated(tiny_bundle, "--prompt", PROMPT, "--system", "Be brief.")
    assert is_answer(data, runtime, SYSTEM)
    file = tmp_path / "messages.json"
    file.write_text(json.dumps(USER))
    data, _ = generated(tiny_bundle, "--messages", file, "--system", "Be brief.")
    assert is_answer(data, runtime, SYSTEM)
    file.write_text(json.dumps(SYSTEM))
    assert "got a system message" in one_error_line(
        invoke("generate", tiny_bundle, "--messages", file, "--system", "x")
    )


@pytest.mark.parametrize("end", ["", "\n", "\r\n"], ids=["no newline", "newline", "CRLF"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["no mark", "byte order mark"])
@pytest.mark.parametrize("source", ["file", "standard input"])
def test_one_final_newline_and_a_byte_order_mark_are_not_text(
    tiny_bundle: Path, runtime: Runtime, tmp_path: Path, source: str, mark: bytes, end: str
) -> None:
    data = mark + (PROMPT + "\u2028\n" + end).encode()
    file = tmp_path / "prompt.txt"
    file.write_bytes(data)
    arguments = ["--prompt-file", file] if source == "file" else ["--prompt", "-"]
    wanted = PROMPT + "\u2028" + ("\n" if end else "")
    found, _ = generated(tiny_bundle, "--raw", *arguments, stdin=data)
    assert is_answer(found, runtime, wanted)
    assert found["prompt_tokens"] == len(runtime.codec.encode(wanted))


def test_messages_go_through_the_chat_template(tiny_bundle: Path, runtime: Runtime, tmp_path: Path) -> None:
    file = tmp_path / "messages.json"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(USER).encode())
    data, note = generated(tiny_bundle, "--messages", file)
    assert is_answer(data, runtime, USER)
    assert note == "specrt: the prompt is messages\n"


def test_a_last_message_is_continued(tiny_bundle: Path, runtime: Runtime, tmp_path: Path) -> None:
    file = tmp_path / "messages.json"
    file.write_text(json.dumps(ANSWERED))
    data, _ = generated(tiny_bundle, "--messages", file, "--continue-final-message")
    assert is_answer(data, runtime, ANSWERED, continue_final_message=True)
    assert not is_answer(data, runtime, ANSWERED)


def test_a_template_gets_variables_and_tools(tiny_bundle: Path, runtime: Runtime, tmp_path: Path) -> None:
    """The tiny template reads ``add_generation_prompt`` alone; the rest is shown by tests of the codec."""
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([{"type": "function", "function": {"name": "f"}}]))
    given = ["--chat-template-kwargs", '{"add_generation_prompt": false, "x": 1}', "--tools", file]
    data, _ = generated(tiny_bundle, "--prompt", PROMPT, *given)
    assert is_answer(data, runtime, USER, add_generation_prompt=False)
    assert not is_answer(data, runtime, USER)


REFUSED: dict[str, tuple[list[str], str]] = {
    "raw with system": (["--prompt", "a", "--raw", "--system", "s"], "--raw: got --system too"),
    "raw with messages": (["--messages", "m.json", "--raw"], "--raw: got --messages too"),
    "raw with variables": (
        ["--prompt", "a", "--raw", "--chat-template-kwargs", '{"x": 1}'],
        "chat_template_kwargs: only",
    ),
    "raw with a name": (["--prompt", "a", "--raw", "--chat-template-name", "x"], "chat_template_name: only for lists"),
    "an unknown name": (["--prompt", "a", "--chat-template-name", "x"], "got 'x'; expected one of default"),
    "no JSON": (["--prompt", "a", "--chat-template-kwargs", "{x}"], "--chat-template-kwargs: not JSON ("),
    "a list": (["--prompt", "a", "--chat-template-kwargs", "[1]"], "--chat-template-kwargs: got list, expected an"),
    "messages twice": (["--prompt", "a", "--chat-template-kwargs", '{"messages": []}'], "got messages, expected other"),
    "no tools file": (["--prompt", "a", "--tools", "none.json"], "none.json: cannot be read as text"),
    "a user's continuation": (
        ["--prompt", "a", "--continue-final-message", "--chat-template-kwargs", '{"add_generation_prompt": true}'],
        "add_generation_prompt: got continue_final_message too",
    ),
    "an escape": (["--prompt", "a", "--stop", "a\\q"], "got the escape \\q, expected \\n, \\t, \\\\ or \\uXXXX"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_refused(tiny_bundle: Path, name: str) -> None:
    arguments, message = REFUSED[name]
    result = invoke("generate", tiny_bundle, *arguments)
    assert result.exit_code == 2
    assert message in one_error_line(result)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "latin-1"])
def test_files_of_other_encodings_get_one_line(tiny_bundle: Path, tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("naïve".encode(encoding))
    error = one_error_line(invoke("generate", tiny_bundle, "--prompt-file", file))
    assert "UTF-8" in error and "prompt.txt" in error


def test_a_stop_string_takes_escapes(tiny_bundle: Path, runtime: Runtime) -> None:
    """The text is cut where the escaped character first comes; the same without escapes is found nowhere."""
    text = runtime.generate(USER, max_new_tokens=40, ignore_eos=True).text
    char = next(char for char in text[4:] if char.isprintable() and char not in '\\"')
    arguments = ["generate", tiny_bundle, "--prompt", PROMPT, "--max-new-tokens", 40, "--ignore-eos"]
    result = invoke(*arguments, "--stop", f"\\u{ord(char):04x}")
    assert result.stdout == text[: text.index(char)] + "\n"
    assert invoke(*arguments, "--stop", f"\\\\u{ord(char):04x}").stdout == text + "\n"


def test_a_chat_message_may_begin_with_a_slash(tiny_bundle: Path, runtime: Runtime) -> None:
    result = invoke("chat", tiny_bundle, "--max-new-tokens", 3, stdin="//reset it\n/reset it\n/exit \nno\n")
    assert result.exit_code == 0
    messages = [{"role": "user", "content": "/reset it"}]
    answer = runtime.generate(messages, max_new_tokens=3).text
    assert result.stdout.startswith(f"{answer}\n/reset it: no such command; ")
    assert result.stdout.count("\n") == 2 + answer.count("\n")
    assert f"of {len(runtime.codec.encode(messages))} prompt tokens" in result.stderr
