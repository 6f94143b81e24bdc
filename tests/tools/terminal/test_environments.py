"""Every command in every hostile environment: a documented exit code, at most one line of error, nothing left over.

Rows are the commands of the group, so that a new command without a row fails here. Columns are environments. Commands
that take long run as a whole in a few columns only, and print their help in the others.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from specrt.engines import errors
from specrt.tools.cli import main
from specrt.tools.lab.models import MODELS

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the commands run in forks")
ROOT = Path(__file__).resolve().parents[3]
SHORT = ["--max-new-tokens", "8"]
NOTE = "specrt: the prompt is "  # what generate says on standard error, error or not


@dataclass(frozen=True)
class Row:
    """A command with arguments; {bundle}, {model} and {out} are filled in. ``code`` is what it ends with elsewhere."""

    arguments: list[str]
    code: int = 0
    is_long: bool = False


ROWS = {
    "export": Row(["{model}", "-o", "{out}/exported"], is_long=True),
    "distill": Row(["{bundle}", "-o", "{out}/head", "--tokens", "2000"], is_long=True),
    "warm": Row(["{bundle}"]),
    "build": Row(["{bundle}", "--backend", "tensorrt"], code=errors.BackendError.exit_code),
    "generate": Row(["{bundle}", "--prompt", "naïve 你好", *SHORT]),
    "chat": Row(["{bundle}", *SHORT]),
    "verify": Row(["{bundle}", *SHORT, "-o", "{out}/certificate.json", "--num-draws", "1000"], is_long=True),
    "tune": Row(["{bundle}", *SHORT], is_long=True),
    "inspect": Row(["{bundle}"]),
    "doctor": Row([]),
    "plan": Row(["{model}", "--bandwidth", "10", "--tflops", "1"]),
    "align": Row(["{bundle}", "--num-prompts", "1", *SHORT, "--json", "{out}/align.json"], is_long=True),
    "bench": Row(["{bundle}", "--json", "{out}/none/bench.json"], code=errors.UsageError.exit_code),
    "serve": Row(["{bundle}", "--api-key-file", "{out}/none"], code=errors.UsageError.exit_code),
    "batch": Row(["{bundle}", "{out}/none.jsonl", "{out}/batch.jsonl"], code=errors.UsageError.exit_code),
    "compare": Row(["{bundle}", "--backend", "tensorrt"], code=errors.BackendError.exit_code),
    "gpu-check": Row(["--output", "{out}/none/gpu-check.json"], code=errors.UsageError.exit_code),
}


@dataclass(frozen=True)
class Column:
    """An environment. ``code``: what a command that ends well elsewhere ends with here; others keep their own.

    ``runs``: the long commands that run as a whole.
    """

    request: dict[str, Any] = field(default_factory=dict)
    stdout: str | None = "out"
    stderr: str | None = "err"
    stdin: str | None = "in"
    code: int = 0
    runs: tuple[str, ...] = ()
    codes: dict[str, int] = field(default_factory=dict)


FAILS = errors.ResourceError.exit_code
USAGE = errors.UsageError.exit_code
NO_HOME = {"HOME": "/nonexistent", "SPECRT_CACHE": None, "XDG_CACHE_HOME": None}
COLUMNS = {
    "latin-1": Column({"encoding": "latin-1"}, runs=("export", "tune", "align")),
    "cp1252": Column({"encoding": "cp1252"}),
    "ascii": Column({"encoding": "ascii"}),
    "a full disk": Column(stdout="/dev/full", code=FAILS, runs=("align",)),
    "a closed standard output": Column(stdout=None, code=FAILS),
    "a reader that went away": Column(stdout="broken pipe"),
    "a full disk for errors": Column(stderr="/dev/full"),
    "closed standard error": Column(stderr=None),
    "closed standard input": Column(stdin=None, codes={"chat": USAGE}),
    "a home that does not exist": Column({"env": NO_HOME}),
    "a home that is a file": Column({"env": {**NO_HOME, "HOME": __file__}}),
    "a cache that is a file": Column({"env": {"SPECRT_CACHE": __file__}}),
    "a removed folder": Column({"cwd": None}, codes={"plan": USAGE}),
    "no temporary folder": Column({"env": {"TMPDIR": "/nonexistent"}}),
    "few descriptors": Column({"limits": {"RLIMIT_NOFILE": 10}}),
    "files of 1000 bytes": Column(
        {"limits": {"RLIMIT_FSIZE": 1000}},
        stdout=os.devnull,
        runs=("export", "verify"),
        codes={"export": FAILS, "verify": FAILS},
    ),
    "a narrow, dumb terminal": Column({"env": {"COLUMNS": "1", "LINES": "1", "TERM": "dumb", "NO_COLOR": "1"}}),
}
DOCUMENTED = {0, errors.SpecrtError.exit_code, *(k.exit_code for k in errors.SpecrtError.__subclasses__())}


class Server:
    """Commands run in forks of one process (``environment_server``), started by ``prefix`` as another user."""

    def __init__(self, folder: Path, modules: list[str], prefix: list[str], env: dict[str, str]) -> None:
        self.folder = folder
        pipe = subprocess.PIPE
        command = [*prefix, sys.executable, "-m", "tests.tools.terminal.environment_server", *modules]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=env)
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"

    def run(self, argv: list[str], column: Column, **more: Any) -> tuple[int, str, str]:
        """(exit code, standard output, standard error)"""
        assert self.process.stdin is not None and self.process.stdout is not None
        paths = [column.stdin, column.stdout, column.stderr]
        places = [str(self.folder / name) if name in ("in", "out", "err") else name for name in paths]
        request = {"argv": argv, "streams": places, **column.request, **more}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        code = int(self.process.stdout.readline())
        shown = [(self.folder / name).read_bytes() if name in ("out", "err") else b"" for name in paths[1:]]
        encoding = request.get("encoding", "utf-8")
        return code, shown[0].decode(encoding), shown[1].decode(encoding)


def environment(home: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("SPECRT_DEBUG", "XDG_CACHE_HOME")}
    return {**kept, "HOME": str(home), "SPECRT_CACHE": str(home / "cache"), "OMP_NUM_THREADS": "1", **more}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home of models in which one seems to exist already, by its size."""
    folder = tmp_path_factory.mktemp("models")
    model = MODELS["smollm2-135m"]
    (folder / model.name).mkdir()
    with (folder / model.name / model.filename).open("wb") as file:
        file.truncate(model.num_bytes)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    started = Server(
        folder, ["specrt.exporter.export", "onnxruntime"], [], environment(folder, SPECRT_MODELS=str(models))
    )
    (folder / "in").write_text("Hello\n")
    with started.process:
        yield started
        started.process.stdin.close()  # type: ignore[union-attr]


def test_every_command_has_a_row() -> None:
    assert set(ROWS) == set(main.commands)


# Others are much like them.
SLOW = {"cp1252", "a home that is a file", "a cache that is a file", "a full disk for errors"}


@pytest.mark.parametrize(
    "environment_name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in COLUMNS]
)
def test_every_command_in(environment_name: str, server: Server, tiny_bundle: Path, tmp_path: Path) -> None:
    column, wrong = COLUMNS[environment_name], {}
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, bundle)  # tune writes next to it
    places = {"bundle": bundle, "model": tiny_bundle.with_name("model"), "out": tmp_path}
    before = {path.name for path in tmp_path.iterdir()}
    for name, row in ROWS.items():
        is_help = row.is_long and name not in column.runs
        arguments = ["--help"] if is_help else [text.format(**places) for text in row.arguments]
        code, output, shown = server.run([name, *arguments], column)
        expected = 0 if is_help else row.code
        expected = expected or (column.code if is_help else column.codes.get(name, column.code))
        lines = [line for line in shown.splitlines() if line.startswith("specrt: ") and NOTE not in line]
        # With few descriptors, how far a command comes depends on the libraries.
        is_right = code in DOCUMENTED if environment_name == "few descriptors" else code == expected
        has_line = len(lines) == (code != 0) or column.stderr != "err"
        if not is_right or not has_line or "Traceback" in shown + output:
            wrong[name] = (code, expected, shown[-600:])
    assert wrong == {}
    left = {path.name for path in tmp_path.iterdir()} - before
    assert left <= {"exported", "certificate.json", "align.json", "bundle.tuning.json"}
    if environment_name == "files of 1000 bytes":
        assert left == set()


def test_without_the_protection_a_command_ends_in_a_traceback(server: Server, tiny_bundle: Path) -> None:
    """The negative control of the matrix: the same server sees the faults."""
    argv = ["generate", str(tiny_bundle), "--prompt", "naïve 你好", *SHORT]
    for column in (COLUMNS["latin-1"], COLUMNS["a full disk"]):
        code, _, shown = server.run(argv, column, bare=True)
        assert code not in DOCUMENTED - {1} and "Traceback" in shown


def test_json_that_cannot_be_encoded_parses_to_the_same_text(server: Server, tiny_bundle: Path) -> None:
    argv = ["generate", str(tiny_bundle), "--prompt", "naïve 你好", "--json", *SHORT]
    texts = []
    for encoding in ("utf-8", "latin-1", "ascii"):
        code, output, _ = server.run(argv, Column({"encoding": encoding}))
        assert code == 0
        texts.append(json.loads(output)["text"])
    assert texts[0] == texts[1] == texts[2] and not texts[0].isascii()


CHAT_INPUTS = {
    "bytes that are not text": (b"hi \xff\nhello\n", "utf-8", "a byte that is not utf-8 (0xff)"),
    "a cut character": (b"hi \xe4\xbd\nhello\n", "utf-8", "a byte that is not utf-8 (0xe4)"),
    "NUL": (b"a\0b\nhello\n", "utf-8", "a NUL byte"),
    "not ASCII": ("é\nhello\n".encode(), "ascii", "a byte that is not ascii (0xc3)"),
}


@pytest.mark.parametrize(("content", "encoding", "reported"), CHAT_INPUTS.values(), ids=CHAT_INPUTS)
def test_a_line_of_chat_that_is_not_text_costs_one_line(
    server: Server, tiny_bundle: Path, content: bytes, encoding: str, reported: str
) -> None:
    file = server.folder / "lines"
    file.write_bytes(content)
    column = Column({"encoding": encoding}, stdin=str(file))
    code, output, shown = server.run(["chat", str(tiny_bundle), *SHORT], column)
    lines = shown.splitlines()
    assert code == 0 and output
    assert len(lines) == 2 and reported in lines[0] and "tokens" in lines[1]


def test_a_user_without_a_home_and_a_name(tiny_bundle: Path) -> None:
    """Reads all files and writes none but in the temporary folder, as in a container of an unknown uid."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv to become an unknown user")
    temporary = Path(tempfile.mkdtemp())  # pytest's own folders are closed to others
    temporary.chmod(0o1777)
    bundle = shutil.copytree(tiny_bundle, temporary / "bundle")
    only = "-all,+dac_read_search"
    caps = [f"--inh-caps={only}", "--ambient-caps=+dac_read_search", f"--bounding-set={only}"]
    prefix = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", *caps]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "TMPDIR": str(temporary)}
    (temporary / "in").write_text("Hello\n")
    server = Server(temporary, ["onnxruntime"], prefix, env)
    codes = {}
    with server.process:
        for name in ("generate", "chat", "inspect", "doctor"):
            arguments = [text.format(bundle=bundle) for text in ROWS[name].arguments]
            code, _, shown = server.run([name, *arguments], Column())
            codes[name] = (code, shown if code else "")
        refused = server.run(["verify", str(bundle), "-o", str(bundle / "x")], Column())
        server.process.stdin.close()  # type: ignore[union-attr]
    assert codes == dict.fromkeys(codes, (0, ""))
    assert refused[0] == FAILS and "Permission denied" in refused[2] and len(refused[2].splitlines()) == 1
    private = temporary / "specrt-54321"
    assert (private / ".cache" / "specrt" / "verified.json").is_file()
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    shutil.rmtree(temporary)


PLACES = {
    "below a file": "{file}/x",
    "far below a file": "{file}/a/b/x",
    "a long name": "{out}/" + "n" * 256,
    "a kernel's folder": "/proc/x",
    "a read-only disk": "{mount}/x",
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_an_output_that_cannot_be_used_is_refused_before_anything_is_read(
    server: Server, place: str, tmp_path: Path
) -> None:
    """The source does not exist either: the output is looked at first."""
    file, mount = tmp_path / "file", tmp_path / "mount"
    file.touch()
    mount.mkdir()
    is_mounted = "{mount}" in place
    if is_mounted and subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=64k", "none", str(mount)]).returncode:
        pytest.skip("needs the right to mount a read-only disk")
    try:
        output = place.format(file=file, out=tmp_path, mount=mount)
        code, _, shown = server.run(["export", str(tmp_path / "none"), "-o", output], Column())
        assert (code, len(shown.splitlines())) == (FAILS, 1), shown
        assert "choose another --output" in shown
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mount"]
    finally:
        if is_mounted:
            subprocess.run(["umount", str(mount)], check=True)


def test_an_empty_name_is_refused(server: Server) -> None:
    code, _, shown = server.run(["export", "none", "-o", ""], Column())
    assert (code, len(shown.splitlines())) == (USAGE, 1) and "empty name" in shown
