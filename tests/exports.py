"""Tiny models and their exports, each made once for all workers of a test run."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tiny import save_tiny_model, tiny_llama_config

DIGITS = 16  # of the name of a model or bundle


def digest(*parts: object) -> str:
    """A short name for ``parts``, which JSON can write."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:DIGITS]


def made_once(place: Path, make: Callable[[Path], object]) -> Path:
    """``place``, which ``make`` writes if no worker has; others wait. What ``make`` leaves half-written is not used."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_name(f"{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            partial = place.with_name(f"{place.name}.partial")
            make(partial)
            place.with_name(f"{place.name}.made").write_text(json.dumps(_state_of(partial)))
            partial.rename(place)
    return place


def _state_of(place: Path) -> dict[str, list[int]]:
    """Size in bytes and time of the last change in ns of each file below ``place``, or of that file.

    Bundles that were made later next to their model do not count.
    """
    files = {file.relative_to(place).as_posix(): file.stat() for file in (place, *place.rglob("*")) if file.is_file()}
    own = {name: stat for name, stat in files.items() if not name.startswith("bundle-")}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in own.items()}


class Exports:
    """Models and bundles below ``folder``, which workers share. Tests copy a bundle that they change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def model(self, config: Any = None, **overrides: Any) -> Path:
        """The folder of the tiny Llama, or of a random model of ``config``, as ``save_tiny_model`` makes it."""
        full = config if config is not None else tiny_llama_config(**overrides)
        place = self.folder / digest(type(full).__name__, full.to_dict()) / "model"
        return made_once(place, lambda folder: save_tiny_model(folder, full))

    def bundle(self, target: Path, draft: str = "ngram", num_speculative_tokens: int = 4, **options: Any) -> Path:
        """The export of ``target``, a folder that does not change, with these ``ExportOptions``; next to ``target``."""
        from specrt.exporter.export import export
        from specrt.exporter.options import ExportOptions

        def make(output: Path) -> None:
            export(ExportOptions(str(target), output, draft, num_speculative_tokens, **options))

        changes = {name: value for name, value in options.items() if value != "none"}  # the default where it is one
        name = digest(str(target), draft, num_speculative_tokens, changes)
        return made_once(target.parent / f"bundle-{name}", make)

    def check(self) -> None:
        """Raise ``AssertionError`` if a test changed one of them."""
        for made in self.folder.rglob("*.made"):
            place = made.with_suffix("")
            assert _state_of(place) == json.loads(made.read_text()), f"{place}: a test changed what all tests share"
