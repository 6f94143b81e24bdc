"""Which NVIDIA GPUs the driver shows. Asks ``nvidia-smi``, so that no library needs to be installed."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

_FIELDS = "name,compute_cap,driver_version,memory.total"


@dataclass(frozen=True)
class Gpu:
    """``compute_capability`` as in ``8.9``."""

    name: str
    compute_capability: str
    driver_version: str
    memory_bytes: int


def find_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine; none where there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_gpus(listing.stdout) if listing.returncode == 0 else ()


def parse_gpus(listing: str) -> tuple[Gpu, ...]:
    """GPUs from the lines of ``nvidia-smi``; its memory is in MiB. Lines that say anything else are left out."""
    gpus = []
    for line in listing.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4 and fields[3].isdigit():
            gpus.append(Gpu(fields[0], fields[1], fields[2], int(fields[3]) << 20))
    return tuple(gpus)
