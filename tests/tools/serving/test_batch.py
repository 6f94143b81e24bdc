"""Batch files: answers are the server's, what is wrong is an answer, and a run that was killed is resumed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specrt.engines.errors import BackendError, ResourceError, UsageError
from specrt.serving.batch import run_batch
from specrt.serving.batch_files import Answers, requests_of
from tests.tools.commands import invoke, one_error_line
from tests.tools.serving.serving import Served, user, wait_until

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def written(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in lines) + "\n\n")
    return path


def read(path: Path) -> dict[str, Any]:
    """Answers by id, after a check that each is there once."""
    answers = [json.loads(text) for text in path.read_text().splitlines()]
    assert all(list(answer) == ["id", "custom_id", "response", "error"] for answer in answers)
    assert len({answer["custom_id"] for answer in answers}) == len(answers)
    return {answer["custom_id"]: answer["response"] for answer in answers}


def comparable(body: dict[str, Any]) -> dict[str, Any]:
    """Without what differs in every answer."""
    usage = {k: v for k, v in body.get("usage", {}).items() if k != "prompt_tokens_details"}
    same: dict[str, Any] = json.loads(re.sub(r'"call_\w+"', '"call"', json.dumps(body)))
    return {**same, "id": None, "created": None, "usage": usage}


LINES = [
    line("plain", messages=user("Hello, wörld")),
    line("seeded", COMPLETION, prompt="ab", temperature=1.5, seed=5, n=3, max_tokens=12, logprobs=1),
    line("list", COMPLETION, prompt=["ab", "cd"], temperature=0, model="parrot"),
    line("schema", messages=user("x"), json_schema={"enum": ["a", "b"]}, seed=1),
    line(
        "tool",
        messages=user('<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        tools=[{"type": "function", "function": {"name": "f"}}],
    ),
    line("field", messages=user("x"), tempersture=1),
    line("keyword", messages=user("x"), json_schema={"not": {}}),
    line("model", messages=user("x"), model="other"),
    line("long", messages=user("x" * 2000)),
]


def test_answers_are_those_of_the_server(served: Served, tmp_path: Path) -> None:
    requests = requests_of(written(tmp_path / "in.jsonl", *LINES))
    answers = Answers(tmp_path / "out.jsonl", requests)
    run_batch(served.service, requests.values(), answers)
    answers.close()
    got = read(tmp_path / "out.jsonl")
    assert set(got) == set(requests)
    for entry in LINES:
        response, custom_id = served.post(entry["url"], **entry["body"]), entry["custom_id"]
        assert got[custom_id]["status_code"] == response.status_code == answers.status_by_id[custom_id]
        assert comparable(got[custom_id]["body"]) == comparable(response.json()), custom_id
    assert sum(status == 200 for status in answers.status_by_id.values()) == 5


def test_a_stream_is_refused_and_a_fault_is_the_answer_of_its_request(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = served.service.prepare

    def fails(wanted: Any) -> Any:
        if wanted.max_tokens == 7:
            raise ArithmeticError("a fault")
        return prepare(wanted)

    monkeypatch.setattr(served.service, "prepare", fails)
    lines = [line("s", messages=user("x"), stream=True), line("f", messages=user("x"), max_tokens=7)]
    requests = requests_of(written(tmp_path / "in.jsonl", *lines, line("x", messages=user("x"))))
    answers = Answers(tmp_path / "out.jsonl", requests)
    run_batch(served.service, requests.values(), answers)
    answers.close()
    assert answers.status_by_id == {"s": 400, "f": 500, "x": 200}
    assert read(tmp_path / "out.jsonl")["s"]["body"]["error"]["param"] == "stream"


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("{", "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
        ("5", "line 2: the body: got 5, expected an object"),
        ({**line("b"), "custom_id": 5}, "line 2: custom_id: got 5, expected a string"),
        ({**line("b"), "custom_id": ""}, "line 2: custom_id"),
        (line("a"), "line 2: custom_id: got 'a' a second time"),
        ({**line("b"), "method": "GET"}, "line 2: method: got 'GET', expected 'POST'"),
        (line("b", "/v1/embeddings"), "line 2: url: got '/v1/embeddings', expected"),
        ({"custom_id": "b", "method": "POST", "url": CHAT}, "line 2: body: missing"),
        ({**line("b"), "extra": 1}, "line 2: extra: unknown field"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, entry: Any, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        requests_of(written(tmp_path / "in.jsonl", line("a"), entry))
    assert reason in str(caught.value)


def test_a_half_written_line_is_removed_at_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    answers = Answers(path, ["a", "b"])
    for custom_id in ("a", "b"):
        answers.add(custom_id, 200, {"text": "é\n"})
    answers.close()
    data = path.read_bytes()
    first = data.index(b"\n") + 1
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        again = Answers(path, ["a", "b"])
        again.close()
        kept = [0, first, len(data)][data[:size].count(b"\n")]
        assert path.read_bytes() == data[:kept]
        assert list(again.status_by_id) == ["a", "b"][: data[:size].count(b"\n")]


def test_another_file_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    whole = '{"custom_id": "z", "response": {"status_code": 200}}\n'
    for text, reason in (
        ("notes\n", "line 1: got no answer"),
        ("notes", "line 1"),
        (whole, "line 1: got an answer to 'z'"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=reason):
            Answers(path, ["a"])
        assert path.read_text() == text


def test_two_processes_do_not_write_to_one_file(parrot_bundle: Path, tmp_path: Path) -> None:
    source, output = written(tmp_path / "in.jsonl", line("a", messages=user("hi"))), tmp_path / "out.jsonl"
    output.write_bytes(b'{"id":"batch_req_12')  # the first process is in the middle of a line
    hold = f"import fcntl; f = open({str(output)!r}, 'ab'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        done = invoke("batch", parrot_bundle, source, output)
        assert done.exit_code == ResourceError.exit_code
        assert "out.jsonl: another process writes answers to it" in one_error_line(done)
        assert output.read_bytes() == b'{"id":"batch_req_12'
        process.kill()
    assert invoke("batch", parrot_bundle, source, output).exit_code == 0  # nothing is left of the lock
    assert set(read(output)) == {"a"}


def test_a_full_disk_is_one_line() -> None:
    answers = Answers(Path("/dev/full"), ["a"])
    with pytest.raises(ResourceError, match=r"/dev/full: cannot be written .*; what is there is kept"):
        answers.add("a", 200, {})


def test_the_command_ends_with_1_where_an_answer_is_an_error(parrot_bundle: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    source = written(tmp_path / "in.jsonl", line("a", messages=user("hi")), line("b", messages=user("x"), nope=1))
    for _ in range(2):  # the second finds both answers
        done = invoke("batch", parrot_bundle, source, output, "--max-concurrency", 2)
        assert done.exit_code == 1 and "1 of 2 answers are errors" in done.stderr, done.output
        assert {custom_id: answer["status_code"] for custom_id, answer in read(output).items()} == {"a": 200, "b": 400}
    assert "2 of 2 answers are there already" in done.stderr
    source = written(tmp_path / "in.jsonl", line("a", messages=user("hi")))
    assert invoke("batch", parrot_bundle, source, tmp_path / "new.jsonl").exit_code == 0
    assert invoke("batch", parrot_bundle, source, output).exit_code == 2  # it has an answer to 'b'
    assert invoke("batch", parrot_bundle, tmp_path / "none.jsonl", output).exit_code == 2


def test_a_cluster_needs_ray_and_its_options_an_address(
    parrot_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "specrt.serving.ray", raising=False)
    source, output = written(tmp_path / "in.jsonl", line("a", messages=user("hi"))), tmp_path / "out.jsonl"
    done = invoke("batch", parrot_bundle, source, output, "--ray", "local")
    assert done.exit_code == BackendError.exit_code and "pip install 'specrt[ray]'" in one_error_line(done)
    done = invoke("batch", parrot_bundle, source, output, "--ray-actors", 2)
    assert done.exit_code == UsageError.exit_code and "--ray-actors: got no --ray" in one_error_line(done)


def test_runs_that_were_ended_are_resumed(tiny_bundle: Path, tmp_path: Path) -> None:
    """After SIGTERM and SIGKILL: the texts of all runs together are those of one."""
    lines = [
        line(str(number), COMPLETION, prompt=f"The {number} dogs", max_tokens=160, seed=number, ignore_eos=True)
        for number in range(32)
    ]
    source, output = written(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "specrt.tools.cli", "batch", str(tiny_bundle), str(source)]
    command += [str(output), "--threads", "1", "--max-concurrency", "2"]
    assert code_after(signal.SIGTERM, command, output) == 143 and output.read_bytes().endswith(b"\n")
    assert code_after(signal.SIGKILL, command, output) == -signal.SIGKILL
    with output.open("ab") as file:
        file.write(b'{"id":"batch_req_12')  # as if it had been killed in the middle of a line
    killed = read_whole_lines(output)
    assert 1 < len(killed) < len(lines)
    assert invoke("batch", tiny_bundle, source, output, "--threads", 1, "--max-concurrency", 2).exit_code == 0
    got = read(output)
    assert len(got) == len(lines) and read_whole_lines(output)[: len(killed)] == killed
    assert invoke("batch", tiny_bundle, source, tmp_path / "one.jsonl", "--threads", 1).exit_code == 0
    for custom_id, response in read(tmp_path / "one.jsonl").items():
        assert response["body"]["choices"] == got[custom_id]["body"]["choices"]


def read_whole_lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1]


def code_after(number: signal.Signals, command: list[str], output: Path) -> int:
    """The exit code of a run that gets a signal after its first answer."""
    before = output.read_bytes() if output.exists() else b""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: output.exists() and len(read_whole_lines(output)) > before.count(b"\n"), 60)
        process.send_signal(number)
    return process.returncode
