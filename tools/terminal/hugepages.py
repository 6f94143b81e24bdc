"""Weights on huge pages: a pass reads all of them, and with 4 kB pages the address translation costs 5 to 9 % of it.

Where Linux gives huge pages to those who ask (``madvise`` mode), glibc asks on behalf of ``malloc`` if it is set so in
the environment before the process starts. Libraries cannot do that for their host; a command can restart itself.
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
    """``base`` with the setting added where it helps; a ``GLIBC_TUNABLES`` of the user's is left alone."""
    env = dict(base)
    try:
        helps = "[madvise]" in mode_file.read_text(encoding="ascii")
    except OSError:
        helps = False
    if helps:
        env.setdefault(VARIABLE, SETTING)
    return env


def restart_with_huge_pages() -> None:
    """Start the running Python command again with the setting, once; returns where there is nothing to gain."""
    env = environment(os.environ)
    if env != dict(os.environ) and sys.executable:
        with suppress(OSError):  # not allowed, or too many arguments: the command works without as well
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], env)
