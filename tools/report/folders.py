"""Reports without the folders of the machine that wrote them: they are read elsewhere, and may name a person."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_PART = r"[^\s/\\'\"`,;:()\[\]<>]+"
_ABSOLUTE = re.compile(rf"(?<![\w/\\:.~-])(?:~|[A-Za-z]:)?[/\\](?:{_PART}[/\\])+({_PART})")


def without_folders(value: Any) -> Any:
    """``value`` with the last part of each absolute path in its texts: ``/data/ann/x.gguf`` -> ``x.gguf``.

    Texts in mappings, lists and tuples too, in a copy. Hub ids, URLs and relative paths stay.
    """
    if isinstance(value, str):
        home = str(Path.home())
        return _ABSOLUTE.sub(r"\1", value.replace(home, "~") if len(home) > 1 else value)
    if isinstance(value, dict):
        return {key: without_folders(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_folders(entry) for entry in value)
    return value
