"""The target of one generation: a pass over the drafted ids, and samplers that verify them on the same device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np

from specrt.engines.contract import INPUT_IDS, LOGITS, NUM_ACCEPTED, TOKENS
from specrt.engines.errors import ParityError
from specrt.engines.samplers import MATCH, MATCH_SAMPLED, UNIFORMS
from specrt.runtime.drafting.deferred import DeferredTokens, memory_of
from specrt.runtime.sampling.grammar import Constraint
from specrt.runtime.sampling.logprobs import Logprobs, TokenLogprobs
from specrt.runtime.sampling.penalties import Processing
from specrt.runtime.sampling.samplers import Warp
from specrt.runtime.sampling.uniforms import VERIFY, Uniforms
from specrt.runtime.settings import Settings
from specrt.runtime.slots import SlotModel


class Target:
    """Verifies drafts by ``settings.rule``. ``logprobs`` are those of the last verification, if requested.

    ``sampler`` is one of its samplers, for access to the memory that all of them share. ``constraint`` is the text's
    grammar.
    """

    def __init__(
        self, slot: SlotModel, settings: Settings, num_prompt_tokens: int, constraint: Constraint | None = None
    ) -> None:
        self.model, samplers = slot.model, slot.samplers
        self.logprobs: list[TokenLogprobs] = []
        self._is_checked = False
        vocab_size = self.model.spec.vocab_size
        self._processing = Processing(samplers, settings, num_prompt_tokens, vocab_size, constraint)
        self._by_position = settings.rule == MATCH
        replaced = self._processing.replaced
        variant = "processed" if replaced else ""
        self._warp: Warp | None = None
        self._uniforms: Uniforms | None = None
        if settings.is_greedy:
            self._rule = self.sampler = samplers.sampler(MATCH, variant, replaced)
        else:
            self._warp = Warp(samplers, settings, variant, replaced)
            self._uniforms = Uniforms(settings.seed or 0)
            self.sampler = samplers.sampler(MATCH_SAMPLED)
            self._rule = self.sampler if self._by_position else samplers.sampler(settings.rule)
            self._random = samplers.host[UNIFORMS]  # [max_rows, 3] f32
        self._logprobs = None if settings.logprobs is None else Logprobs(samplers, settings.logprobs)

    def verify(self, committed: Sequence[int], drafted: Sequence[int], is_sampled: bool = True) -> tuple[int, int]:
        """Feed what the cache lacks of ``committed``, and ``drafted``; return (accepted n, the target's next token).

        ``is_sampled`` is as in ``specrt.runtime.drafting.drafters.Drafter``: drafts that were not sampled are compared
        with the target's own draws, whichever rule is set. Deferred ids are known afterwards.

        Raises ``ValueError`` if the buffers are too small, ``ParityError`` if the first logits are not finite, and
        ``UsageError`` if processors and grammar allow no id where the text continues.
        """
        model, is_processed = self.model, bool(self._processing.replaced)
        rule = self._rule if drafted and is_sampled else self.sampler
        model.release_features()
        with nullcontext() if is_processed else model.binding.together():
            width, rows = model.feed([*committed[model.kv_len :], *drafted], len(drafted) + 1, memory_of(drafted))
            if not self._is_checked:
                self._check_finite()
            num_open = self._processing.run(width, rows, committed, (), drafted) if is_processed else rows
            if self._warp is not None:
                self._warp.run(width, rows)
            if self._uniforms is not None:
                self._draw(self._uniforms, len(committed), rows)
            rule.run(width, rows)
            late = [INPUT_IDS] if isinstance(drafted, DeferredTokens) else []
            verdict, tokens, *fed = rule.read(NUM_ACCEPTED, TOKENS, *late)
        if isinstance(drafted, DeferredTokens):
            # a pass is padded only if it has a single id
            drafted.learn(fed[0][0, width - len(drafted) : width].tolist())
            model.learn(len(committed), drafted)
        accepted = min(int(verdict[0]), len(drafted))  # rows beyond the drafted ids repeat the last one
        if accepted >= num_open:
            raise self._processing.no_id_left(len(committed) + accepted)
        token = int(tokens[accepted])
        if self._logprobs is not None:
            self.logprobs = self._logprobs.of(width, rows, [*drafted[:accepted], token])
        return accepted, token

    def _draw(self, uniforms: Uniforms, num_committed: int, rows: int) -> None:
        """Give the samplers the random numbers of a verification."""
        if self._by_position:
            self._random[:rows] = uniforms.at_positions(num_committed, rows)
        else:
            self._random[:rows] = uniforms.of_round(VERIFY, num_committed, rows)
        self.sampler.upload(UNIFORMS)

    def rollback(self, num_committed: int) -> None:
        """The sequence has ``num_committed`` tokens: discard the KV of drafted tokens beyond them."""
        self.model.rollback(num_committed - 1)

    def _check_finite(self) -> None:
        """Without this check an overflow would look like one repeated token, with every draft accepted."""
        self._is_checked = True
        largest = self.model.read(LOGITS)[0][0].max()  # NaN if any is
        if not np.isfinite(largest):
            raise ParityError(
                f"target: the largest logit after the prompt is {largest} in {self.model.spec.dtype}, expected a finite"
                " one; export the bundle again with --dtype fp32"
            )
