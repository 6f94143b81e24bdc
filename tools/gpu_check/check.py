"""``specrt gpu-check``: the experiments one after the other, each in a process with a time limit, and their report."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specrt import __version__
from specrt.engines.errors import SpecrtError, one_line
from specrt.engines.gpu import device
from specrt.engines.progress import SILENT, Progress
from specrt.tools.gpu_check.experiment import CRASHED, FAILED, PASSED, SKIPPED, TIMED_OUT, Experiment
from specrt.tools.gpu_check.kit import Kit, kit_in, unpacked
from specrt.tools.gpu_check.table import EXPERIMENTS, TOTAL_S
from specrt.tools.report.folders import without_folders

FIND_S = 60.0  # for a GPU to be found
_PACKAGES = ("numpy", "cuda-bindings", "tensorrt-rtx", "tensorrt", "onnxruntime-gpu", "onnxruntime", "tokenizers")


@dataclass(frozen=True)
class Outcome:
    """The verdict on one experiment, why, and the raw figures."""

    name: str
    question: str
    verdict: str
    reason: str
    seconds: float
    limit_s: float
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """What ``gpu-check`` writes; ``gpu`` is None where there is none, and ``no_gpu`` says why."""

    specrt: str
    created_utc: str
    system: str
    python: str
    versions: dict[str, str]
    gpu: dict[str, str] | None
    no_gpu: str
    seconds: float
    outcomes: tuple[Outcome, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def named(self, *verdicts: str) -> list[str]:
        """The experiments with one of these verdicts."""
        return [outcome.name for outcome in self.outcomes if outcome.verdict in verdicts]

    @property
    def exit_code(self) -> int:
        """0: none failed and some ran; 1: some failed; 9: none could run."""
        if self.named(FAILED, CRASHED, TIMED_OUT):
            return 1
        return 0 if self.named(PASSED) else 9


def gpu_check(
    path: Path,
    experiments: Sequence[Experiment] = EXPERIMENTS,
    total_s: float = TOTAL_S,
    progress: Progress = SILENT,
) -> Report:
    """Perform ``experiments`` on the kit or bundle at ``path``, which stays as it is, in ``total_s`` at most.

    The report names no folder of this machine. Raises ``UsageError`` where ``path`` is neither. Uses no network.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as work:
        folder = unpacked(path, Path(work))
        kit = kit_in(folder)
        gpu, reason = _find_gpu()
        outcomes = []
        for experiment in experiments:
            progress.step(experiment.name)
            left = total_s - (time.monotonic() - started)
            outcomes.append(_outcome_of(experiment, kit, folder, reason, left))
    return Report(
        __version__,
        datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        f"{platform.system()} {platform.machine()}",
        platform.python_version(),
        dict(_versions()),
        gpu,
        without_folders(reason),
        round(time.monotonic() - started, 2),
        tuple(outcomes),
    )


def _find_gpu() -> tuple[dict[str, str] | None, str]:
    """The GPU, asked in a process of its own; or why there is none."""
    command = [sys.executable, "-m", "specrt.tools.gpu_check.check"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=FIND_S)
    except subprocess.TimeoutExpired:
        return None, f"the driver did not answer in {FIND_S:.0f} s"
    if done.returncode:
        return None, f"no GPU was found: {one_line(done.stderr.strip().rpartition(chr(10))[2])}"
    found: dict[str, str] = json.loads(done.stdout)
    return (None, found["reason"]) if "reason" in found else (found, "")


def _asked() -> dict[str, str]:
    try:
        api = device.open_device().api
    except SpecrtError as error:
        return {"reason": str(error)}
    return {"name": api.name, "compute capability": api.compute_capability}


def _versions() -> list[tuple[str, str]]:
    found = []
    for name in _PACKAGES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _outcome_of(experiment: Experiment, kit: Kit, folder: Path, no_gpu: str, left_s: float) -> Outcome:
    started = time.monotonic()
    limit = min(experiment.limit_s, left_s)

    def outcome(verdict: str, reason: str, figures: dict[str, Any] | None = None) -> Outcome:
        seconds = round(time.monotonic() - started, 2)
        return Outcome(
            experiment.name,
            experiment.question,
            verdict,
            without_folders(reason),
            seconds,
            experiment.limit_s,
            without_folders(figures or {}),
        )

    if (reason := experiment.missing(kit) or no_gpu) or limit <= 0:
        return outcome(SKIPPED, reason or "the time for all experiments is used up")
    result = folder.parent / f"{experiment.name}.json"
    code, last = _run(experiment, folder, result, limit)
    stored = json.loads(result.read_text(encoding="utf-8")) if result.is_file() else {}
    figures = stored.get("figures", {})
    if code is None:
        return outcome(TIMED_OUT, f"it took longer than {limit:.0f} s", figures)
    if code or not stored.get("verdict"):
        return outcome(CRASHED, f"its process ended with {code} ({last})", figures)
    return outcome(stored["verdict"], stored["reason"], figures)


def _run(experiment: Experiment, folder: Path, result: Path, limit_s: float) -> tuple[int | None, str]:
    """(exit code, None at the time limit; the last line that the experiment's process wrote)"""
    function = f"{experiment.run.__module__}:{experiment.run.__name__}"
    command = [sys.executable, "-m", "specrt.tools.gpu_check.worker", function, str(folder), str(result)]
    environment = {**os.environ, "SPECRT_CACHE": str(folder.parent / "cache")}
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit_s, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        return None, ""
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    return done.returncode, one_line(lines[-1]) if lines else "no output"


if __name__ == "__main__":
    print(json.dumps(_asked()))
