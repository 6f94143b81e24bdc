"""Conversations with the target's hidden states, on disk: flat files of rows, and an index that is written last.

A process that is killed leaves rows that no line of the index names; the next one removes them. Hidden states are in
fp16, which holds those of the residual stream to three digits; values beyond its range are clipped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from specrt.engines.codec import from_json
from specrt.engines.errors import ResourceError
from specrt.engines.interface import Array
from specrt.engines.storage.files import cannot_write

INDEX = "index.jsonl"
_HINT = "make room, then run the same command again: it continues"
_LARGEST = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class Rows:
    """A conversation of T tokens as the target saw it.

    ``ids`` [T] i32. ``taps`` [T, 3 Ht] and ``last`` [T, Ht]: the tapped hidden states, and what the target's lm_head
    reads. ``normalizer`` [T] f32: logsumexp of the target's logits; ``top`` [T] i32: their argmax. ``first_written`` is
    the first token that the target wrote, of its own prompt if it wrote one; ``first_scored`` is the answer's first.
    """

    ids: Array
    taps: Array
    last: Array
    normalizer: Array
    top: Array
    first_written: int
    first_scored: int


@dataclass(frozen=True)
class Entry:
    """A line of the index: where conversation ``number`` begins, its tokens, and the seconds of writing until then."""

    number: int
    start: int
    num_tokens: int
    first_written: int
    first_scored: int
    is_held_out: bool
    seconds: float


def row_bytes(hidden_size: int, num_taps: int = 3) -> int:
    """Bytes on disk of one token."""
    return (num_taps + 1) * hidden_size * 2 + 3 * 4


class Store:
    """The conversations in ``folder``. Rows are appended by ``add``, and read through memory maps."""

    def __init__(self, folder: Path, hidden_size: int, num_taps: int = 3) -> None:
        self.folder, self.hidden_size, self.num_taps = folder, hidden_size, num_taps
        self._columns: dict[str, tuple[str, int]] = {  # name: (dtype, columns)
            "ids": ("<i4", 1),
            "taps": ("<f2", num_taps * hidden_size),
            "last": ("<f2", hidden_size),
            "normalizer": ("<f4", 1),
            "top": ("<i4", 1),
        }
        folder.mkdir(parents=True, exist_ok=True)
        self.entries: list[Entry] = []
        self._recover()

    @property
    def num_tokens(self) -> int:
        """Tokens of all conversations."""
        return self.entries[-1].start + self.entries[-1].num_tokens if self.entries else 0

    @property
    def seconds(self) -> float:
        """Seconds of writing so far."""
        return self.entries[-1].seconds if self.entries else 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.folder.iterdir())

    def add(self, number: int, rows: Rows, seconds: float, is_held_out: bool) -> int:
        """Append a conversation; return how many values were clipped. Raises ``ResourceError``."""
        clipped = 0
        try:
            for name, (dtype, columns) in self._columns.items():
                values = getattr(rows, name).reshape(len(rows.ids), columns)
                if dtype == "<f2":
                    clipped += int((np.abs(values) > _LARGEST).sum())
                    values = np.clip(values, -_LARGEST, _LARGEST)
                with self._path(name).open("ab") as file:
                    file.write(np.ascontiguousarray(values, dtype).tobytes())
            first = rows.first_written, rows.first_scored
            entry = Entry(number, self.num_tokens, len(rows.ids), *first, is_held_out, seconds)
            with (self.folder / INDEX).open("a", encoding="utf-8") as index:
                index.write(json.dumps(asdict(entry)) + "\n")
        except OSError as error:
            raise cannot_write(self.folder, error, _HINT) from error
        self.entries.append(entry)
        return clipped

    @contextmanager
    def interruptible(self, keep: Callable[[], object]) -> Iterator[None]:
        """If a signal ends the block (Ctrl-C, say), call ``keep``, which adds the conversations that are not finished.

        One whose ``add`` was interrupted is either in ``entries`` by then, or not in the files.
        """
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self._recover()
            keep()
            raise

    def rows(self, entry: Entry) -> Rows:
        """The rows of one conversation, as views of the files."""
        maps = self._maps()
        part = slice(entry.start, entry.start + entry.num_tokens)
        found = {name: maps[name][part] for name in self._columns}
        found = {name: rows if self._columns[name][1] != 1 else rows[:, 0] for name, rows in found.items()}
        return Rows(**found, first_written=entry.first_written, first_scored=entry.first_scored)

    def chosen(self, held_out: bool) -> Iterator[Entry]:
        """The entries of one part, by number: the order does not depend on which conversation ended first."""
        return (e for e in sorted(self.entries, key=lambda entry: entry.number) if e.is_held_out == held_out)

    def _maps(self) -> dict[str, Array]:
        size = self.num_tokens
        return {
            name: np.memmap(self._path(name), dtype, "r", shape=(size, columns)) if columns else np.empty((size, 0))
            for name, (dtype, columns) in self._columns.items()
        }

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.bin"

    def _recover(self) -> None:
        """Read the index; remove rows that it does not name. Raises ``ResourceError`` if rows are missing."""
        self.entries = _entries(self.folder / INDEX)
        for name, (dtype, columns) in self._columns.items():
            path, size = self._path(name), self.num_tokens * columns * np.dtype(dtype).itemsize
            path.touch()
            if path.stat().st_size < size:
                raise ResourceError(
                    f"{path}: got {path.stat().st_size} bytes, expected {size} by its index; remove {self.folder}"
                )
            os.truncate(path, size)


def _entries(index: Path) -> list[Entry]:
    """The complete lines of the index; a line that was cut off is removed from the file."""
    if not index.exists():
        return []
    content = index.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    if len(complete) < len(content):
        os.truncate(index, len(complete))
    return [from_json(Entry, json.loads(line)) for line in complete.splitlines()]
