"""The answers of a bench as they arrive, one JSON line each, so that an interrupted bench can be resumed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specrt.engines.codec import from_json
from specrt.engines.errors import UsageError
from specrt.engines.storage.files import cannot_write, write_text_file
from specrt.tools.bench.methods import Answer

Key = tuple[str, str, int]  # method, prompt, repeat


class Journal:
    """The answers so far. Without a ``path`` nothing is stored on disk.

    ``identity`` describes the bench. Raises ``UsageError`` for a file of another bench, and without ``resume`` for any
    existing file.
    """

    def __init__(self, path: Path | None, identity: dict[str, Any], resume: bool = False) -> None:
        self.path = path
        self.answers: dict[Key, Answer] = {}
        self._facts: dict[str, int] = {}
        if path is None:
            return
        first = json.dumps(identity, sort_keys=True)
        if path.exists():
            if not resume:
                raise UsageError(f"{path}: a bench was interrupted; continue with --resume, or remove this file")
            self._read(path, first)
        else:
            write_text_file(path, first + "\n")

    def _read(self, path: Path, first: str) -> None:
        lines = path.read_text(encoding="utf-8").split("\n")
        if lines[:1] != [first]:
            raise UsageError(
                f"{path}: it belongs to a bench with other settings; give the same ones, or remove this file"
            )
        whole = []
        for line in lines[1:]:
            try:
                *key, value = json.loads(line)
            except ValueError:  # the line that was being written when the bench was interrupted
                break
            whole.append(line)
            if len(key) == 1:
                self._facts[key[0]] = value
            else:
                self.answers[key[0], key[1], key[2]] = from_json(Answer, value)
        write_text_file(path, "\n".join([first, *whole]) + "\n")

    def add(self, key: Key, answer: Answer) -> None:
        """Store an answer."""
        self.answers[key] = answer
        self._write([*key, asdict(answer)])

    def settled(self, name: str, value: int) -> int:
        """The value stored under ``name`` before the interruption, else ``value``, which is then stored."""
        if name not in self._facts:
            self._facts[name] = value
            self._write([name, value])
        return self._facts[name]

    def _write(self, line: list[Any]) -> None:
        if self.path is not None:
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            except OSError as error:
                raise cannot_write(self.path, error, "make room, and continue with --resume") from error

    def finish(self) -> None:
        """The bench is done: remove the file."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
