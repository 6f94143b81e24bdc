"""The processor: its name, and the number of available cores."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def available_cores() -> int:
    """Cores this process may run on: the default number of threads."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The processor's name from the system, such as ``AMD EPYC 9354``, or else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
