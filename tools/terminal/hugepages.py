"""Weights on huge pages: a pass reads all weights, and with 4 kB pages address translation takes 5 to 9 % of its time.

Where Linux gives huge pages on request (``madvise`` mode), glibc requests them for ``malloc`` if the environment says
so before the process starts. A library cannot set this for its host process; a command can restart itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

VARIABLE = "GLIBC_TUNABLES"
SETTING = "glibc.malloc.hugetlb=1"
_MODE_FILE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def environment(base: Mapping[str, str], mode_file: Path = _MODE_FILE) -> dict[str, str]:
    """``base`` with the setting added where it helps; a ``GLIBC_TUNABLES`` that the user set is kept."""
    env = dict(base)
    try:
        helps = "[madvise]" in mode_file.read_text(encoding="ascii")
    except OSError:
        helps = False
    if helps:
        env.setdefault(VARIABLE, SETTING)
    return env


def restart_with_huge_pages() -> None:
    """Restart the running Python command with the setting, once; return where there is nothing to gain."""
    env = environment(os.environ)
    if env != dict(os.environ) and sys.executable:
        with suppress(OSError):  # not allowed, or too many arguments: the command also works without it
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], env)
