"""Methods in processes: they answer, fail, end with their owner, and share a process where they can."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import pytest

from specrt.engines.errors import SpecrtError, UsageError
from specrt.engines.manifest import manifest_from_bundle
from specrt.tools.bench.methods import (
    Worker,
    WorkerPool,
    choose_methods,
    needed_bytes,
    own_or_shared,
    processes,
)

ECHO = """
import json, sys
print(json.dumps({"attention": "none"}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    reply = {"token_ids": request["prompt_ids"], "seconds": 1.0}
    if not request["prompt_ids"]:
        reply = {"error": "no tokens", "exit_code": 2}
    if request["prompt_ids"] == [99]:
        sys.exit("it is all too much")
    print(json.dumps(reply), flush=True)
"""


@pytest.fixture
def echo(tmp_path: Path) -> list[str]:
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    return [sys.executable, str(script)]


def test_a_worker_answers_and_ends_with_its_owner(echo: list[str]) -> None:
    with Worker("echo", echo) as worker:
        assert worker.started == {"attention": "none"}
        assert worker.ask(prompt_ids=[3, 4]) == {"token_ids": [3, 4], "seconds": 1.0}
        (process,) = [p for p in psutil.Process().children() if p.cmdline() == echo]
    assert not process.is_running()


def test_a_failed_request_is_one_line_with_its_code_and_the_worker_goes_on(echo: list[str]) -> None:
    with Worker("echo", echo) as worker:
        with pytest.raises(SpecrtError, match=r"^echo: no tokens$") as caught:
            worker.ask(prompt_ids=[])
        assert caught.value.exit_code == 2
        assert worker.ask(prompt_ids=[1])["token_ids"] == [1]


def test_a_worker_that_dies_is_reported_with_its_last_words(echo: list[str]) -> None:
    with (
        Worker("echo", echo) as worker,
        pytest.raises(SpecrtError, match=r"^echo: its process ended with status 1 \(it is all too much\)$"),
    ):
        worker.ask(prompt_ids=[99])


def real_worker(library: str, bundle: Path) -> list[str]:
    settings = {"library": library, "dtype": "fp32", "bundle": str(bundle), "threads": 1, "with_draft": False}
    return [sys.executable, "-m", "specrt.tools.bench.worker", json.dumps(settings)]


@pytest.mark.parametrize("library", ["specrt", "transformers"])
def test_a_worker_that_cannot_load_gives_one_line(library: str, tmp_path: Path) -> None:
    with pytest.raises(SpecrtError, match=r"^it: .*no such bundle folder") as caught:
        Worker("it", real_worker(library, tmp_path / "none"))
    assert caught.value.exit_code == 6
    assert "\n" not in str(caught.value)


def test_a_worker_ends_when_its_input_does(tiny_bundle: Path) -> None:
    """As when the parent dies: no process is left to kill it."""
    worker = Worker("it", real_worker("specrt", tiny_bundle))
    process = worker._process
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=10) == 0
    process.stdin = None
    worker.close()


def test_a_waiting_worker_uses_no_cpu(tiny_bundle: Path) -> None:
    with Worker("it", real_worker("specrt", tiny_bundle)) as worker:
        worker.ask(prompt_ids=[3, 4, 5], max_new_tokens=20, draft="ngram", k=4, ignore_eos=True)
        time.sleep(0.2)
        process = psutil.Process(worker._process.pid)
        before = sum(process.cpu_times()[:2])
        time.sleep(0.5)
        assert sum(process.cpu_times()[:2]) - before < 0.1


def test_methods_of_the_same_weights_share_a_process(tiny_bundle: Path) -> None:
    manifest = manifest_from_bundle(tiny_bundle)
    groups = processes(choose_methods("eager,plain,eager-bf16,assisted,model", manifest))
    assert [[c.name for c in group] for group in groups] == [["eager", "assisted"], ["plain", "model"], ["eager-bf16"]]
    fp32, _, bf16 = (needed_bytes(manifest, group) for group in groups)
    assert fp32 - bf16 == manifest.target.weights_bytes // 2


def test_processes_are_shared_where_memory_is_short(tiny_bundle: Path) -> None:
    manifest = manifest_from_bundle(tiny_bundle)
    methods = choose_methods("eager,assisted,plain", manifest)
    assert own_or_shared(manifest, methods, 1 << 40) == [[c] for c in methods]
    assert own_or_shared(manifest, methods, 1 << 20) == processes(methods)


def test_unknown_methods_are_refused(tiny_bundle: Path) -> None:
    with pytest.raises(UsageError, match=r"^methods: got 'fast', expected some of eager"):
        choose_methods("eager,fast", manifest_from_bundle(tiny_bundle))


def test_a_pool_that_cannot_load_leaves_no_process(tiny_bundle: Path, tmp_path: Path) -> None:
    methods = choose_methods("plain", manifest_from_bundle(tiny_bundle))
    before = len(psutil.Process().children())
    with pytest.raises(SpecrtError, match="specrt bundle"):
        WorkerPool(tmp_path / "none", [methods], 1)
    assert len(psutil.Process().children()) == before
