"""The settings and the results of a bench."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from specrt.engines.errors import UsageError
from specrt.tools.bench.sample import Sample
from specrt.tools.bench.scores import Score
from specrt.tools.machine import QUIET_PERCENT, Machine
from specrt.tools.report.folders import without_folders

PAST = 100  # cached tokens of the timed passes


@dataclass(frozen=True)
class Settings:
    """How to compare. ``one_at_a_time`` loads one process after the other, for machines short of memory.

    ``repeats`` and ``max_new_tokens`` are upper limits; ``budget_s`` None means no time limit. With ``keep_tokens``
    a short time leads to fewer prompts instead of shorter answers. Above ``temperature`` 0 every prompt is sampled with
    the same seed, so that specrt's methods must still agree.
    """

    k: int
    threads: int
    max_new_tokens: int = 64
    repeats: int = 3
    ignore_eos: bool = False
    one_at_a_time: bool = False
    temperature: float = 0.0
    budget_s: float | None = None
    sources: dict[str, str] = field(default_factory=dict)
    keep_tokens: bool = False

    def __post_init__(self) -> None:
        for name in ("k", "threads", "max_new_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name.replace('_', '-')}: got {getattr(self, name)}, expected 1 or more")
        if self.temperature < 0 or (self.budget_s is not None and self.budget_s <= 0):
            raise UsageError(f"temperature {self.temperature} or the budget {self.budget_s}: expected more than 0")


@dataclass(frozen=True)
class Passes:
    """Bare passes after ``PAST`` cached tokens, in ms: ``target_ms[w - 1]`` of w tokens, ``draft_ms`` of one.

    ``bound_ms`` is the time to read the target's weights from memory. It is None where a pass takes less, because the
    machine was busy when the bandwidth was measured, and for weights that may stay in the processor's caches, whose
    bandwidth is not measured. ``break_even_by_k`` is the acceptance at which K breaks even; None where even full
    acceptance would not.
    """

    target_ms: tuple[float, ...]
    draft_ms: float
    bandwidth_bytes_per_s: float | None
    bound_ms: float | None
    break_even_by_k: dict[int, float | None]


@dataclass(frozen=True)
class PromptEntry:
    name: str
    category: str
    bucket: str
    num_tokens: int


@dataclass(frozen=True)
class Bench:
    """Scores of the methods, and the conditions of the measurement.

    ``failed`` has the reason for each missing method, ``skipped`` what did not fit into the context or the time.
    ``started`` is the first reply of each method's process: dtype, attention, or llama.cpp's kernels.
    ``busy_percent_during`` is how busy other processes kept the CPU during the bench.
    """

    created_utc: str
    machine: Machine
    bundle: str
    sources: dict[str, str]
    settings: Settings
    processes: tuple[tuple[str, ...], ...]
    repeats: int
    prompts: tuple[PromptEntry, ...]
    skipped: tuple[str, ...]
    failed: dict[str, str]
    scores: tuple[Score, ...]
    passes: Passes | None
    sample: Sample | None
    started: dict[str, dict[str, Any]] = field(default_factory=dict)
    busy_percent_during: float = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether other load made the times unreliable."""
        return self.machine.is_busy or self.busy_percent_during > QUIET_PERCENT

    def for_files(self) -> Bench:
        """The bench without this machine's folders, for ``--json`` and ``--html``."""
        texts = {name: without_folders(getattr(self, name)) for name in ("sources", "skipped", "failed", "started")}
        settings = replace(self.settings, sources=without_folders(self.settings.sources))
        return replace(self, settings=settings, **texts)

    def as_dict(self) -> dict[str, Any]:
        """The bench as JSON."""
        return asdict(self)
