"""Faults that the tests must find: ``python -m tests.mutations [NAME...]`` runs those of ``mutations.toml``.

Each replaces one text in one file by another, in a copy of the sources, and the tests named with it must fail. First
the same tests must pass on the copy as it is. Exit code 1 when a mutation survives or its tests cannot be run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_suffix(".toml")
PACKAGES = ("engines", "runtime", "exporter", "tools")  # folders that are packages below ``specrt``
SERVING = "tools/serving"  # the package ``specrt.serving``
OTHERS = ("tests", "docs", "pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile")
TIMEOUT_S = 600.0
PASSED, FAILED = 0, 1  # exit codes of pytest


@dataclass(frozen=True)
class Mutation:
    """``old`` occurs once in ``file`` and becomes ``new``; at least one of ``tests`` must fail then."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """``text`` of the file with the fault. Raises ``ValueError`` unless ``old`` occurs exactly once."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"{self.name}: its text occurs {count} times in {self.file}, expected once; adapt {TABLE.name}"
            )
        return text.replace(self.old, self.new)


def mutations() -> list[Mutation]:
    """Those of ``mutations.toml``, in its order."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return [Mutation(name, row["file"], row["old"], row["new"], tuple(row["tests"])) for name, row in table.items()]


def copy_sources(folder: Path) -> None:
    """Copy the sources as they are installed, ``specrt/engines`` for ``engines``, so that Python finds them first."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "specrt", folder / "specrt", ignore=ignored)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / "specrt" / name, ignore=ignored)
    (folder / "specrt" / SERVING).rename(folder / "specrt" / "serving")
    for name in OTHERS:
        source = ROOT / name
        shutil.copytree(source, folder / name, ignore=ignored) if source.is_dir() else shutil.copy(source, folder)


def place_of(file: str) -> str:
    """Where a copy of the sources has ``file``."""
    if file.startswith(f"{SERVING}/"):
        return f"specrt/serving{file.removeprefix(SERVING)}"
    return f"specrt/{file}" if file.split("/")[0] in PACKAGES else file


def run_tests(folder: Path, tests: Sequence[str]) -> tuple[int, str]:
    """(pytest's exit code, its last lines) of ``tests`` in a copy; a run beyond ``TIMEOUT_S`` counts as failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, "--basetemp", str(folder / "temporary")],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return FAILED, f"no end after {TIMEOUT_S:.0f} s"
    return done.returncode, "\n".join((done.stdout + done.stderr).splitlines()[-5:])


def outcome_of(mutation: Mutation) -> tuple[bool, str]:
    """(whether it was killed, a line for the report)."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_sources(folder)
        path = folder / place_of(mutation.file)
        path.write_text(mutation.applied(path.read_text(encoding="utf-8")), encoding="utf-8")
        code, last = run_tests(folder, mutation.tests)
    word = {PASSED: "SURVIVED", FAILED: "killed"}.get(code, f"ERROR: pytest exited with {code}: {last}")
    return code == FAILED, f"{mutation.name}: {word} ({mutation.file}, {time.monotonic() - started:.0f} s)"


def check_unchanged(chosen: Sequence[Mutation]) -> bool:
    """Whether the tests of all ``chosen`` pass without a fault: otherwise a failure would show nothing."""
    with tempfile.TemporaryDirectory() as name:
        copy_sources(Path(name))
        code, last = run_tests(Path(name), sorted({test for mutation in chosen for test in mutation.tests}))
    if code != PASSED:
        print(f"the tests do not pass as they are:\n{last}")
    return code == PASSED


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description="Run the mutations.")
    parser.add_argument("names", nargs="*", help="which (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many at a time")
    options = parser.parse_args(arguments)
    known = {mutation.name: mutation for mutation in mutations()}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"unknown: {', '.join(unknown)}; expected names of {TABLE.name}")
    chosen = [known[name] for name in options.names or known]
    if not check_unchanged(chosen):
        return 1
    killed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for is_killed, line in pool.map(outcome_of, chosen):
            print(line, flush=True)
            killed += is_killed
    print(f"{killed} of {len(chosen)} mutations were killed")
    return 0 if killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
