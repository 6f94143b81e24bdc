"""What a process does slowly the first time, done before the first text: passes, samplers, rounds as CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from specrt.engines.interface import KEPT_WIDTHS, write_pass
from specrt.engines.progress import SILENT, Progress
from specrt.engines.samplers import MIN_P, SAMPLER_NAMES, TEMPERATURE, TOP_K, TOP_P
from specrt.runtime.drafting.drafters import Drafter
from specrt.runtime.options import Options, options_of
from specrt.runtime.settings import settings_of
from specrt.runtime.slots import Slot, SlotModel
from specrt.runtime.target import Target

if TYPE_CHECKING:
    from specrt.runtime.runtime import Runtime

_FILLER = 0  # the fed id; what a pass computes does not matter
_HARMLESS = {TEMPERATURE: 1.0, TOP_K: 0, TOP_P: 1.0, MIN_P: 0.0}
# Ways to decode whose rounds are captured ahead: greedy, sampled, sampled with filters. Others are in a text.
_WAYS: tuple[Options, ...] = ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9})
_REPEATS = 3  # rounds until one is captured: the first feeds the prompt, the second is enqueued step by step


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


def warm_slot(runtime: Runtime, slot: Slot, progress: Progress = SILENT) -> None:
    """Run in ``slot`` every pass of a round and every sampler after it, and on a GPU rounds of each K.

    TensorRT-RTX compiles kernels in the first pass of a size: afterwards a text compiles none. Caches are left empty.
    """
    _run_passes(slot, runtime.manifest.num_speculative_tokens, progress)
    if slot.target.model.binding.is_async:
        _run_rounds(runtime, slot, progress)


def _run_passes(slot: Slot, k: int, progress: Progress) -> None:
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
        for each in (binding, *samplers) * 2:  # the second run is captured as a CUDA graph
            each.run(width, rows)
        binding.read()  # waits, so that the progress is that of the device
        progress.advance(1)


def _run_rounds(runtime: Runtime, slot: Slot, progress: Progress) -> None:
    """Run rounds until each is captured as a CUDA graph.

    After a round a draft model is fed one token, or two if its draft was accepted whole; a head each committed one.
    """
    manifest = runtime.manifest
    draft = "none" if slot.draft is None else "model"
    has_head = slot.draft is not None and slot.draft.model.spec.reads_features
    numbers = range(1, manifest.num_speculative_tokens + 1)
    progress.step("rounds", total=len(_WAYS) * len(numbers))
    for way in _WAYS:
        for k in numbers:
            wanted = options_of({**way, "num_speculative_tokens": k, "draft": draft, "ignore_eos": True})
            settings = settings_of(wanted, manifest)
            for num_committed in range(1, k + 2) if has_head else (1, k + 1):
                target, drafter = runtime.begin(slot, [_FILLER], settings)
                _repeat(target, drafter, k, num_committed, manifest.target.spec.max_seq_len)
            progress.advance(1)
    for part in (slot.target, slot.draft):
        if part is not None:
            part.model.rollback(0)


def _repeat(target: Target, drafter: Drafter, k: int, num_committed: int, max_seq_len: int) -> None:
    """Rounds that each commit ``num_committed`` tokens: with a draft, then with a lookup's."""
    tokens = [_FILLER]
    target.verify(tokens, ())
    tokens.append(_FILLER)
    for is_own in (*[True] * _REPEATS, *[False] * _REPEATS):
        if len(tokens) + k + 1 >= max_seq_len:
            return
        drafted = drafter.propose(tokens, k) if is_own else [_FILLER] * k
        target.verify(tokens, drafted, is_own and drafter.is_sampled)
        tokens += [_FILLER] * num_committed
        target.rollback(len(tokens))
        drafter.rollback(len(tokens))
