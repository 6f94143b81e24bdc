"""The machine of a measurement, the memory that it needs, and whether the machine is idle enough."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from specrt.engines.processor import cpu_name

VERSIONED = ("specrt", "torch", "transformers", "onnxruntime", "numpy")
QUIET_PERCENT = 10.0
# On an idle machine sleeping costs torch a third of its speed; on a busy one spinning costs it nine tenths.
OMP_WAIT_POLICY = "OMP_WAIT_POLICY"
BANDWIDTH_BYTES = 1 << 30
BANDWIDTH_TRIES = 3
CACHED_BYTES = 64 << 20  # weights below this may stay in the processor's caches, and memory does not bound their passes


@dataclass(frozen=True)
class Machine:
    """The CPU by its own name, the cores that this process may use, and how busy other processes kept them before.

    ``omp_wait_policy`` is the environment's: torch's threads spin while they wait for each other, or sleep if PASSIVE.
    """

    cpu: str
    cores: int
    threads: int
    busy_percent_before: float
    omp_wait_policy: str | None
    versions: dict[str, str]

    @property
    def is_busy(self) -> bool:
        return self.busy_percent_before > QUIET_PERCENT

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        policy = f" (OMP_WAIT_POLICY {self.omp_wait_policy})" if self.omp_wait_policy else ""
        return f"{self.cpu}, {self.threads} threads on {self.cores} cores{policy}; {versions}"


def _cpu_seconds() -> tuple[float, float, float]:
    """Seconds so far, over all cores: total, busy, and busy with this process and its ended children.

    Time that a hypervisor gave to other machines ("steal") counts as busy; the time of guests is in the user time.
    """
    import psutil

    times = psutil.cpu_times()._asdict()
    total = sum(seconds for name, seconds in times.items() if not name.startswith("guest"))
    own = os.times()
    return (
        total,
        total - times["idle"] - times.get("iowait", 0.0),
        own.user + own.system + own.children_user + own.children_system,
    )


class Watch:
    """How busy other processes keep the CPU from now on. Our children count as others until they are waited for."""

    def __init__(self, cpu_seconds: Callable[[], tuple[float, float, float]] = _cpu_seconds) -> None:
        self._cpu_seconds, self._since = cpu_seconds, cpu_seconds()

    def busy_percent(self) -> float:
        """The percentage of all cores that others used so far."""
        total, busy, own = (now - since for now, since in zip(self._cpu_seconds(), self._since, strict=True))
        return max(0.0, 100 * (busy - own) / total) if total > 0 else 0.0


def describe_machine(threads: int, watch_seconds: float = 1.0) -> Machine:
    """Observe the CPU for ``watch_seconds`` s. Call it before our own work starts."""
    import psutil

    from specrt.engines.processor import available_cores

    installed = {distribution.name for distribution in importlib.metadata.distributions()}
    versions = {name: importlib.metadata.version(name) for name in VERSIONED if name in installed}
    busy_percent = psutil.cpu_percent(watch_seconds)
    return Machine(cpu_name(), available_cores(), threads, busy_percent, os.environ.get(OMP_WAIT_POLICY), versions)


def notes(machine: Machine, process_bytes: Sequence[int], one_at_a_time: bool) -> list[str]:
    """Remarks to print before the results: the memory that processes of ``process_bytes`` need, and other load."""
    import psutil

    needed, largest = max(process_bytes) if one_at_a_time else sum(process_bytes), max(process_bytes)
    available = psutil.virtual_memory().available
    line = f"needs about {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are available"
    lines = [f"{line}; --one-at-a-time needs {largest / 1e9:.1f} GB" if largest < needed > available else line]
    if machine.is_busy:
        lines.append(
            f"other programs keep the CPU {machine.busy_percent_before:.0f} % busy: these times are unreliable. torch "
            f"suffers most, since its threads spin while they wait ({OMP_WAIT_POLICY}=PASSIVE lets them sleep)"
        )
    return lines


def peak_bytes() -> int:
    """The largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def read_bandwidth(threads: int, repeats: int = 9) -> float:
    """Bytes per second that ``threads`` threads together read from memory: the median of ``repeats`` dot products."""
    parts = np.array_split(np.ones(BANDWIDTH_BYTES // 4, np.float32), threads)
    times = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            started = time.perf_counter()
            list(pool.map(lambda part: float(np.dot(part, part)), parts))
            times.append(time.perf_counter() - started)
    return BANDWIDTH_BYTES / statistics.median(times)


def bounding_bandwidth(
    shown_bytes_per_s: float, threads: int, read: Callable[[int], float] = read_bandwidth
) -> tuple[float, bool]:
    """(the memory's bandwidth in bytes per second, whether it bounds passes that read ``shown_bytes_per_s``).

    Other load can only lower a measurement. One that passes exceed is repeated; the largest is returned.
    """
    found = 0.0
    for _ in range(BANDWIDTH_TRIES):
        found = max(found, read(threads))
        if found >= shown_bytes_per_s:
            return found, True
    return found, False


def memory_bound(num_bytes: int, fastest_ms: float, threads: int) -> tuple[float | None, float | None]:
    """(bandwidth in bytes per second, bound in ms) of passes that read ``num_bytes``; the fastest took ``fastest_ms``.

    No bound where a pass takes less; nothing is measured for so few bytes that they may stay in caches.
    """
    if num_bytes < CACHED_BYTES:
        return None, None
    bandwidth, bounds = bounding_bandwidth(num_bytes / fastest_ms * 1e3, threads)
    return bandwidth, num_bytes / bandwidth * 1e3 if bounds else None
