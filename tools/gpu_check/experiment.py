"""What an experiment is: a question, a time limit, what it needs, and a function that records figures."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrt.engines.errors import SpecrtError
from specrt.engines.storage.files import write_text_file
from specrt.tools.gpu_check.kit import Kit

PASSED, FAILED, SKIPPED, TIMED_OUT, CRASHED = "passed", "failed", "skipped", "timed out", "crashed"


class Skip(Exception):
    """What an experiment needs is not there; the text is the reason."""


class Failed(Exception):
    """The answer is no; the text says what differs."""


class Notes:
    """The raw figures of an experiment, written to ``path`` whenever one is added: a later crash keeps them."""

    def __init__(self, path: Path | None = None) -> None:
        self.figures: dict[str, Any] = {}
        self._path = path

    def add(self, name: str, value: Any) -> None:
        """Record ``value``, which JSON can write, under ``name``."""
        self.figures[name] = value
        self.write("", "")

    def write(self, verdict: str, reason: str) -> None:
        """Write the verdict; none yet while it is empty."""
        if self._path is not None:
            content = {"verdict": verdict, "reason": reason, "figures": self.figures}
            write_text_file(self._path, json.dumps(content))


@dataclass(frozen=True)
class Experiment:
    """``needs`` are modules, each with the package that installs it; ``parts`` of the kit, of which one must be there.

    ``run`` is a function of a module, raises ``Skip`` or ``Failed``, and records in ``Notes`` what it measured.
    """

    name: str
    question: str
    limit_s: float
    needs: dict[str, str]
    parts: tuple[str, ...]
    run: Callable[[Kit, Notes], None]

    def missing(self, kit: Kit) -> str | None:
        """Why it cannot run with these modules and this kit; None if it can."""
        for module, package in self.needs.items():
            if not _is_installed(module):
                return f"needs {package}, which is not installed"
        if self.parts and not any(getattr(kit, part) for part in self.parts):
            return f"needs {' or '.join(self.parts)} of a kit; make one with 'make gpu-kit'"
        return None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def perform(run: Callable[[Kit, Notes], None], kit: Kit, notes: Notes) -> tuple[str, str]:
    """(verdict, reason) of an experiment's ``run`` in this process."""
    try:
        run(kit, notes)
    except Skip as error:
        return SKIPPED, str(error)
    except (Failed, SpecrtError) as error:
        return FAILED, str(error)
    return PASSED, ""
