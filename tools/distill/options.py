"""The options of ``specrt distill``, checked before any work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specrt.engines.errors import UsageError

TEXT_SHARE = 0.42  # of the minutes, for writing text
DEFAULT_MINUTES = 60.0
PASSES_OVER_TEXT = 4  # with --tokens
TOKENS_OF_LANE = 1000  # of a lane of torch at least, with --tokens: the last conversation of each is cut off
MIN_LANES = 8


@dataclass(frozen=True)
class DistillOptions:
    """``source`` is a bundle, or what ``specrt export`` takes as a target. ``kind`` is ``head`` or ``layers``.

    ``writer`` of the text: ``runtime``, ``torch``, or ``auto``, which is torch unless the target is quantized.
    """

    source: str
    output: Path
    prompts: Path | None = None
    minutes: float | None = None
    tokens: int | None = None
    bundle: Path | None = None
    kind: str = "head"
    writer: str = "auto"
    num_layers: int = 4
    max_draft_vocab: int = 8192
    seed: int = 0
    threads: int | None = None
    keep_data: bool = False
    force: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.minutes is not None and self.tokens is not None:
            raise UsageError(f"--minutes {self.minutes:g}: got --tokens {self.tokens} too; give one of them")
        for option, number in (("--max-draft-vocab", self.max_draft_vocab), ("--num-layers", self.num_layers)):
            if number < 1:
                raise UsageError(f"{option} {number}: expected 1 or more")
        if self.minutes is None and self.tokens is None:
            object.__setattr__(self, "minutes", DEFAULT_MINUTES)

    @property
    def work_folder(self) -> Path:
        """The text and the checkpoints, next to the output; removed at the end."""
        return self.output.with_name(f"{self.output.name}.training")
