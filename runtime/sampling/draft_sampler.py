"""From the logits of a draft's pass to its next id."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrt.engines.contract import TOKENS
from specrt.engines.interface import Array, Memory
from specrt.engines.samplers import DRAFT_PROBS, MATCH, MATCH_SAMPLED, PROBS, UNIFORMS
from specrt.runtime.drafting.deferred import DeferredTokens
from specrt.runtime.model import UNKNOWN
from specrt.runtime.sampling.grammar import Constraint
from specrt.runtime.sampling.penalties import Processing
from specrt.runtime.sampling.samplers import Warp
from specrt.runtime.sampling.uniforms import DRAFT, Uniforms
from specrt.runtime.settings import Settings
from specrt.runtime.slots import SlotModel


class DraftSampler:
    """The next id of ``draft``, which drafts for ``target``: the first most likely one when greedy, else a drawn one.

    With ``match`` it draws with the target's own uniforms for the position, so that the two often agree. With ``block``
    the probabilities of step ``i`` go to ``draft_probs[i]``, where the target's rule reads them. On a device, where
    rows are not always aligned, they are copied there. With a ``constraint``, ids that it forbids have probability 0.
    """

    def __init__(
        self,
        draft: SlotModel,
        target: SlotModel,
        settings: Settings,
        num_prompt_tokens: int,
        constraint: Constraint | None = None,
    ) -> None:
        samplers = draft.samplers
        self._vocab_size = target.model.spec.vocab_size
        self._processing = Processing(samplers, settings, num_prompt_tokens, self._vocab_size, constraint)
        replaced = self._processing.replaced
        self._is_processed = bool(replaced)
        self._uniforms: Uniforms | None = None
        self._warps: list[Warp] = []
        self._is_read = False  # whether the target's rule reads the probabilities
        variant = "processed" if replaced else ""
        if settings.is_greedy:
            self._samplers = [samplers.sampler(MATCH, variant, replaced)]
            return
        self._uniforms = Uniforms(settings.seed or 0)
        self._by_position = settings.rule == MATCH
        rule = None if self._by_position else target.samplers.sampler(settings.rule)
        self._rule, self._is_read = rule if samplers.is_async else None, rule is not None
        self._memory = samplers.memory
        rows: list[Memory | None] = [None]
        if rule is not None and not samplers.is_async:
            probs = rule.memory[DRAFT_PROBS]
            rows = [probs[i : i + 1] for i in range(len(probs) - 1)]
        self._samplers = []
        for index, row in enumerate(rows):
            memory = {} if row is None else {PROBS: row}
            step = "" if row is None else f" row {index}"
            self._warps.append(Warp(samplers, settings, variant + step, {**replaced, **memory}))
            self._samplers.append(samplers.sampler(MATCH_SAMPLED, step, memory))
        self._random = samplers.host[UNIFORMS]  # [1, 3] f32
        self._round, self._most_rows = -1, target.model.spec.max_rows
        self._numbers: Array = self._random

    def put(self, token: int, drafted: Sequence[int]) -> None:
        """``token`` comes after ``drafted`` with probability one, without a pass."""
        if self._is_read:
            probs = np.zeros((1, self._vocab_size), np.float32)
            probs[0, token] = 1
            self._warps[self._step(drafted)].write(probs)
            self._give(len(drafted))

    def draw(self, width: int, committed: Sequence[int], drafted: Sequence[int]) -> int | None:
        """The next id after ``committed`` and ``drafted``, from the logits of the last pass, of ``width`` tokens.

        None if processors allow no id there. After deferred ids the next one is deferred too.
        """
        if self._is_processed and self._processing.run(width, 1, committed, drafted, ()) == 0:
            return None
        step = self._step(drafted)
        if self._uniforms is not None:
            self._warps[step].run(width, 1)
            self._random[0] = self._numbers_of(self._uniforms, len(committed))[len(drafted)]
            self._samplers[0].upload(UNIFORMS)
            self._give(len(drafted))
        sampler = self._samplers[step]
        sampler.run(width, 1)
        if isinstance(drafted, DeferredTokens):
            drafted.take(sampler.memory[TOKENS])
            return UNKNOWN
        return int(sampler.read(TOKENS)[0][0])

    def _numbers_of(self, uniforms: Uniforms, num_committed: int) -> Array:
        """The random numbers of a round, made at once: one call for each id takes longer. [K + 1, 3] f32"""
        if self._round != num_committed:
            self._round = num_committed
            if self._by_position:
                self._numbers = uniforms.at_positions(num_committed, self._most_rows)
            else:
                self._numbers = uniforms.of_round(DRAFT, num_committed, self._most_rows)
        return self._numbers

    def _step(self, drafted: Sequence[int]) -> int:
        """There is a sampler for each row of q, or one for all."""
        return len(drafted) if len(self._samplers) > 1 else 0

    def _give(self, row: int) -> None:
        """Copy the probabilities to ``row`` of what the rule reads, where they are not there already."""
        if self._rule is not None:
            probs = self._memory[PROBS]  # [1, V] f32
            self._rule.take(DRAFT_PROBS, row * probs.shape[1], probs)
