"""Lists NVIDIA GPUs, from CUDA's driver in its order, or from ``nvidia-smi`` if cuda-bindings is missing.

``nvidia-smi`` has another order, and does not report the memory of a GPU that shares the host's (Jetson, GB10).
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_FIELDS = "name,compute_cap,driver_version,memory.total"


@dataclass(frozen=True)
class Gpu:
    """A GPU. ``compute_capability`` is as in ``8.9``; ``driver`` is its version, or the newest CUDA that it runs.

    ``memory_bytes`` is None if it is not known.
    """

    name: str
    compute_capability: str
    driver: str
    memory_bytes: int | None


def find_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine; none without a driver."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return _listed_gpus()
    try:
        return tuple(_gpus_of(driver))
    except (RuntimeError, OSError):  # no driver, or one that refuses
        return ()


def _gpus_of(driver: Any) -> Iterator[Gpu]:
    """GPUs from CUDA's driver API (``cuda.bindings.driver``). Creates no context. Raises ``RuntimeError``."""

    def ask(name: str, *arguments: Any) -> Any:
        status, *values = getattr(driver, name)(*arguments)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: {status}")
        return values[0] if values else None

    attributes = driver.CUdevice_attribute
    ask("cuInit", 0)
    major, minor = divmod(ask("cuDriverGetVersion"), 1000)
    for ordinal in range(ask("cuDeviceGetCount")):
        device = ask("cuDeviceGet", ordinal)
        capability = [
            ask("cuDeviceGetAttribute", attribute, device)
            for attribute in (
                attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        ]
        name = ask("cuDeviceGetName", 256, device).decode(errors="replace").rstrip("\0")
        yield Gpu(
            name, ".".join(map(str, capability)), f"for CUDA {major}.{minor // 10}", ask("cuDeviceTotalMem", device)
        )


def _listed_gpus() -> tuple[Gpu, ...]:
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_gpus(listing.stdout) if listing.returncode == 0 else ()


def parse_gpus(listing: str) -> tuple[Gpu, ...]:
    """GPUs from the lines of ``nvidia-smi``; memory is in MiB. Other lines are skipped."""
    gpus = []
    for line in listing.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4 and fields[1].replace(".", "", 1).isdigit():
            memory = int(fields[3]) << 20 if fields[3].isdigit() else None
            gpus.append(Gpu(fields[0], fields[1], fields[2], memory))
    return tuple(gpus)
