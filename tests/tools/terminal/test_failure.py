"""What is not raised from the tree ends in one line and a documented code as well; a closed pipe and signals too."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from specrt.engines.errors import (
    INTERNAL_EXIT_CODE,
    BundleError,
    SourceError,
    SpecrtError,
    UsageError,
)
from specrt.tools.terminal.failure import Stopped, Tool
from tests.tools.commands import invoke


def system_error(number: int, name: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), name)


def caused(error: SpecrtError, cause: BaseException) -> SpecrtError:
    error.__cause__ = cause
    return error


OUTCOMES: dict[str, tuple[BaseException, int, str]] = {
    "ours": (BundleError("b: damaged"), 6, "specrt: error: b: damaged"),
    "ours, of two lines": (SourceError("a\nb"), 3, "specrt: error: a b"),
    "a file that is absent": (system_error(errno.ENOENT, "x"), 2, "specrt: error: x: No such file or directory; check"),
    "a file of others": (system_error(errno.EACCES, "x"), 2, "specrt: error: x: Permission denied; check"),
    "a full disk": (system_error(errno.ENOSPC, "x"), 8, "specrt: error: x: No space left on device; make room"),
    "a read-only disk": (system_error(errno.EROFS, "x"), 8, "specrt: error: x: Read-only file system"),
    "too many files": (system_error(errno.EMFILE), 8, "specrt: error: Too many open files; raise the limit"),
    "a limit of files' size": (system_error(errno.EFBIG), 8, "specrt: error: File too large"),
    "no temporary folder": (FileNotFoundError(2, "No usable temporary directory found"), 8, "specrt: error: No usable"),
    "memory": (MemoryError(), 8, "specrt: error: Cannot allocate memory"),
    "memory of a library": (RuntimeError("std::bad_alloc"), 8, "specrt: error: Cannot allocate memory"),
    "memory while reading": (caused(SourceError("m: cannot be read"), MemoryError()), 8, "specrt: error: m: cannot"),
    "not text": (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), 2, "specrt: error: text: cannot be read"),
    "nested": (RecursionError("deep"), 2, "specrt: error: input: nested too deeply"),
    "a library": (ModuleNotFoundError("x", name="torch"), 2, "specrt: error: torch is not installed"),
    "the server's library": (
        ModuleNotFoundError("x", name="uvicorn"),
        2,
        "specrt: error: uvicorn is not installed and this command needs it; install specrt[serve]",
    ),
    "someone's home": (RuntimeError("Could not determine home directory."), 2, "specrt: error: path: Could not"),
    "a fault of ours": (KeyError("k"), INTERNAL_EXIT_CODE, "specrt: internal error: KeyError: 'k'; please report"),
    "a closed pipe": (BrokenPipeError(), 0, ""),
    "Ctrl-C": (KeyboardInterrupt(), 130, "specrt: interrupted"),
    "SIGTERM": (Stopped(signal.SIGTERM), 143, "specrt: terminated"),
    "SIGHUP": (Stopped(signal.SIGHUP), 129, "specrt: hung up"),
}


def raising(error: BaseException) -> Tool:
    def callback() -> None:
        raise error

    return Tool("tool", callback=callback)


@pytest.mark.parametrize(("error", "code", "line"), OUTCOMES.values(), ids=OUTCOMES)
def test_every_exception_has_a_line_and_a_code(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPECRT_DEBUG", raising=False)
    result = CliRunner().invoke(raising(error))
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith(line) and len(result.stderr.splitlines()) == (line != "")


def test_debugging_shows_the_traceback_of_faults_and_not_of_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECRT_DEBUG", "1")
    assert CliRunner().invoke(raising(KeyError("k"))).stderr.startswith("Traceback")
    assert "Traceback" not in CliRunner().invoke(raising(UsageError("x"))).stderr


def test_without_the_net_an_exception_escapes() -> None:
    """The negative control."""

    @click.command()
    def bare() -> None:
        raise KeyError("k")

    assert isinstance(CliRunner().invoke(bare).exception, KeyError)


def test_a_reader_that_goes_away_does_not_make_a_bundle_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Check:
        name, passed = "greedy", False

    class Failed:
        checks, passed = (Check(),), False

    def leave(_: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("specrt.tools.verify.certificate.certify", lambda *_, **__: Failed())
    monkeypatch.setattr("specrt.tools.verify.certificate.print_certificate", leave)
    assert invoke("verify", tmp_path).exit_code == 1


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "specrt.tools.cli", *map(str, arguments)]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_in_one_line_and_its_code(
    tiny_bundle: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    fifo = tmp_path / "prompt"
    os.mkfifo(fifo)
    pipe = subprocess.PIPE
    arguments = command("generate", tiny_bundle, "--prompt-file", fifo)
    with subprocess.Popen(arguments, stdout=pipe, stderr=pipe, text=True) as process, fifo.open("w"):
        process.send_signal(number)
        output, shown = process.communicate(timeout=60)
    name = {129: "hung up", 143: "terminated"}[code]
    assert (process.returncode, output, shown.strip()) == (code, "", f"specrt: {name}")


def test_ctrl_c_while_libraries_are_imported_is_one_line(tmp_path: Path) -> None:
    """At a module that the command imports, a file of the test in place of torch."""
    (tmp_path / "torch.py").write_text("print('importing', flush=True)\nimport time\ntime.sleep(60)\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command("export", "m", "-o", tmp_path / "x"), stdout=pipe, stderr=pipe, text=True, env=env
    ) as p:
        assert p.stdout is not None and p.stdout.readline() == "importing\n"
        time.sleep(0.05)
        p.send_signal(signal.SIGINT)
        _, shown = p.communicate(timeout=60)
    assert (p.returncode, shown) == (130, "specrt: interrupted\n")


def test_a_pipe_that_closes_at_the_last_flush_is_quiet(tiny_bundle: Path) -> None:
    with subprocess.Popen(command("inspect", tiny_bundle), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)
