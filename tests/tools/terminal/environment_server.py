"""A process that has imported the command and its libraries, and runs it in forks of itself: less than a second each.

One request a line, as JSON: ``argv``; ``env`` (None removes a variable); ``encoding`` of the streams; ``streams``: a
path for each of stdin, stdout and stderr, or None for a closed one; ``cwd``, where None is a folder that was removed;
``limits``: resource limits by name; ``bare`` runs the command without its protection, as a negative control. The
answer is the exit code.
"""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import sys
import tempfile
import traceback
from contextlib import suppress
from typing import Any

import click

import specrt.tools.cli
from specrt.tools.terminal.process import run_specrt


def serve() -> None:
    for name in sys.argv[1:]:
        __import__(name)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    replies.write("ready\n")
    for line in iter(sys.stdin.buffer.readline, b""):
        child = os.fork()
        if child == 0:
            _become(json.loads(line))
        replies.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")


def _become(request: dict[str, Any]) -> None:
    """Arrange the environment, run the command, and end as the interpreter would."""
    for name, value in request.get("env", {}).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    sys.argv = sys.orig_argv = ["specrt", *request["argv"]]
    os.environ["GLIBC_TUNABLES"] = os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")  # no restart
    _enter(request)
    _set_streams(request["streams"], request.get("encoding", "utf-8"))
    for name, limit in request.get("limits", {}).items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    code = 1
    try:
        if request.get("bare"):
            click.Group.main(specrt.tools.cli.main, standalone_mode=False)
        else:
            run_specrt()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
    except BaseException:
        traceback.print_exc()
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        code = 120  # as the interpreter does
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
    os._exit(code)


def _enter(request: dict[str, Any]) -> None:
    folder = request.get("cwd", tempfile.gettempdir())
    if folder is None:
        folder = tempfile.mkdtemp()
        os.chdir(folder)
        shutil.rmtree(folder)
    else:
        os.chdir(folder)
    tempfile.tempdir = None


def _set_streams(paths: list[str | None], encoding: str) -> None:
    modes = (os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number, (name, path, mode) in enumerate(zip(("stdin", "stdout", "stderr"), paths, modes, strict=True)):
        stream = None
        if path is None:
            os.close(number)
        else:
            if path == "broken pipe":
                reader, opened = os.pipe()
                os.close(reader)
            else:
                opened = os.open(path, mode)
            os.dup2(opened, number)
            os.close(opened)
            raw = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
            errors = "backslashreplace" if number == 2 else "strict"
            buffer: Any = io.BufferedReader(raw) if number == 0 else io.BufferedWriter(raw)
            stream = io.TextIOWrapper(buffer, encoding=encoding, errors=errors)
        setattr(sys, name, stream)


if __name__ == "__main__":
    serve()
