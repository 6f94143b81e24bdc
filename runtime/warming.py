"""What a process does slowly the first time, done before the first text: each size of pass, each sampler."""

from __future__ import annotations

import numpy as np

from specrt.engines.interface import KEPT_WIDTHS, write_pass
from specrt.engines.progress import SILENT, Progress
from specrt.engines.samplers import MIN_P, SAMPLER_NAMES, TEMPERATURE, TOP_K, TOP_P
from specrt.runtime.slots import Slot, SlotModel

_FILLER = 0  # the fed id; what a pass computes does not matter
_HARMLESS = {TEMPERATURE: 1.0, TOP_K: 0, TOP_P: 1.0, MIN_P: 0.0}


def sizes_of_verification(k: int) -> list[tuple[int, int]]:
    """(width, rows) of the target's passes in rounds of up to ``k`` drafted ids, and at the end of a prompt.

    A prompt ends with one row, or with two if passes must have two.
    """
    return sorted({*_ending(1), *_ending(2), *((width, width) for width in range(1, k + 2))})


def sizes_of_drafting() -> list[tuple[int, int]]:
    """The same for the draft, which needs one row of each pass."""
    return _ending(1)


def _ending(rows: int) -> list[tuple[int, int]]:
    """Passes for the last ``rows`` rows. The widest stands for all that no backend keeps anything for."""
    return [(width, rows) for width in range(rows, KEPT_WIDTHS + 2)]


def warm_slot(slot: Slot, k: int, progress: Progress = SILENT) -> None:
    """Run every pass of a round of up to ``k`` drafted ids in ``slot``, and every sampler after it.

    TensorRT-RTX compiles kernels in the first pass of a size: afterwards a text compiles none. Caches are left empty.
    """
    parts = [("target", slot.target, sizes_of_verification(k))]
    if slot.draft is not None:
        parts.append(("draft", slot.draft, sizes_of_drafting()))
    for role, part, sizes in parts:
        spec = part.model.spec
        fitting = [(width, rows) for width, rows in sizes if width <= spec.max_width and rows <= spec.max_rows]
        progress.step(f"passes of the {role}", total=len(fitting))
        _run_all(part, fitting, progress)


def _run_all(part: SlotModel, sizes: list[tuple[int, int]], progress: Progress) -> None:
    """A pass of each size at the start of the cache, and all samplers on its logits."""
    binding = part.model.binding
    samplers = [part.samplers.sampler(name) for name in SAMPLER_NAMES]
    part.samplers.write(_HARMLESS)
    part.model.rollback(0)
    for width, rows in sizes:
        write_pass(binding.host, np.full(width, _FILLER), 0, rows)
        binding.upload()
        for each in (binding, *samplers):
            each.run(width, rows)
        binding.read()  # waits, so that the progress is that of the device
        progress.advance(1)
