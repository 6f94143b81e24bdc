"""Option types of click for output paths, checked while the command line is parsed, before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specrt.engines.storage.files import check_writable


class OutputFolder(click.Path):
    """A folder to create. The command checks whether that is possible (``specrt.exporter.bundle``)."""

    name = "path"

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("got an empty name, expected a path", param, ctx)
        return super().convert(value, param, ctx)


class OutputFile(OutputFolder):
    """A file to write. Raises ``UsageError`` or ``ResourceError`` where none can be written."""

    def __init__(self, what: str = "it") -> None:
        super().__init__()
        self._what = what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        check_writable(path, "choose another file", self._what)
        return path


OUTPUT_FILE, OUTPUT_FOLDER = OutputFile(), OutputFolder()
