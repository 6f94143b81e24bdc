"""The files of the repository, and what tests read in them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("specrt", "engines", "runtime", "exporter", "tools")
SOURCES = sorted(path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_FOLDERS = [".ci", "docs", "tests", *PACKAGES]
_FILES = [*ROOT.iterdir(), *(path for folder in _FOLDERS for path in (ROOT / folder).rglob("*"))]
TEXTS = sorted(path for path in _FILES if path.is_file() and path.suffix not in (".pyc", ".gz") and path.name != ".git")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=name_of(path))


def violations(check: Callable[[Path], object], paths: Iterable[Path] = SOURCES) -> dict[str, object]:
    """What ``check`` finds in each file, for the files in which it finds something."""
    return {name_of(path): found for path in paths if (found := check(path))}
