"""Values of ``--json-schema``, ``--regex`` and ``--grammar``: a file's content, or the text itself."""

from __future__ import annotations

from pathlib import Path

from specrt.tools.prompting.textfiles import read_text, without_final_newline


def text_or_file(text: str) -> str:
    """The content of the file that ``text`` names, less one final newline; ``text`` where there is no such file."""
    try:
        is_file = Path(text).is_file()
    except (OSError, ValueError):  # too long for a name, or with a zero byte
        is_file = False
    return without_final_newline(read_text(Path(text))) if is_file else text
