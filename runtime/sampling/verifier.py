"""From the logits of a pass to tokens, for one generation: process, warp, verify. A verifier is its stages in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specrt.engines.contract import INPUT_IDS, LOGITS, NUM_ACCEPTED, TOKENS
from specrt.engines.errors import UsageError
from specrt.engines.interface import Binding, Memory
from specrt.engines.samplers import (
    DRAFT_PROBS,
    FILTER,
    FILTER_WIDE,
    MATCH,
    MATCH_SAMPLED,
    MIN_P,
    NUCLEUS,
    NUM_SORTED,
    PROBS,
    SOFTMAX,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    UNIFORMS,
)
from specrt.runtime.drafting.deferred import DeferredTokens
from specrt.runtime.model import UNKNOWN
from specrt.runtime.sampling.penalties import Processing
from specrt.runtime.sampling.samplers import SlotSamplers, Warp
from specrt.runtime.sampling.uniforms import DRAFT, VERIFY, Uniforms
from specrt.runtime.settings import Settings

_FILTERS = (FILTER, FILTER_WIDE, NUCLEUS)  # each takes the rows that the one before it could not


class Verifier:
    """The target's verifier: which drafted ids are accepted, and what comes next."""

    def __init__(self, samplers: SlotSamplers, settings: Settings, num_prompt_tokens: int) -> None:
        self._processing = Processing(samplers, settings, num_prompt_tokens, samplers.memory[LOGITS].shape[1])
        self._is_processed = bool(self._processing.replaced)
        self._uniforms: Uniforms | None = None
        self._by_position = settings.rule == MATCH
        variant = "processed" if self._is_processed else ""
        if settings.is_greedy:
            self._rule = self._alone = samplers.sampler(MATCH, variant, self._processing.replaced)
            self._warp: Warp | None = None
        else:
            self._uniforms = Uniforms(settings.seed or 0)
            self._warp = warp_of(samplers, settings, variant, self._processing.replaced)
            self._alone = samplers.sampler(MATCH_SAMPLED)
            self._rule = self._alone if self._by_position else samplers.sampler(settings.rule)
            self._random = samplers.host[UNIFORMS]  # [max_rows, 3] f32

    @property
    def sampler(self) -> Binding:
        """A sampler of the target, for what is in the memory of all of them."""
        return self._alone

    def verify(
        self, width: int, rows: int, committed: Sequence[int], drafted: Sequence[int], is_sampled: bool = True
    ) -> tuple[int, int]:
        """(accepted n, the next token) from the last ``rows`` rows of a pass of ``width`` tokens.

        Drafts that were not sampled are matched with the target's own draws, also where the rule is another. Drafted
        ids that are not known yet are learned here, with the verdict.

        Rows beyond ``len(drafted) + 1`` are repetitions and are not looked at. Raises ``UsageError`` when processors
        leave no id where the text goes on.
        """
        num_open = rows
        if self._is_processed:
            num_open = self._processing.run(width, rows, committed, (), drafted)
        if self._warp is not None:
            self._warp.run(width, rows)
        if self._uniforms is not None:
            if self._by_position:
                self._random[:rows] = self._uniforms.at_positions(len(committed), rows)
            else:
                self._random[:rows] = self._uniforms.of_round(VERIFY, len(committed), rows)
            self._alone.upload(UNIFORMS)
        rule = self._rule if drafted and is_sampled else self._alone
        rule.run(width, rows)
        if isinstance(drafted, DeferredTokens):
            verdict, tokens, fed = rule.read(NUM_ACCEPTED, TOKENS, INPUT_IDS)
            drafted.learn(fed[0, width - len(drafted) : width].tolist())  # a filler follows only one id alone
        else:
            verdict, tokens = rule.read(NUM_ACCEPTED, TOKENS)
        accepted = min(int(verdict[0]), len(drafted))
        if accepted >= num_open:
            raise UsageError(
                f"logits_processors: no id is left after {len(committed) + accepted} tokens; "
                "they must allow at least one whatever they have accepted"
            )
        return accepted, int(tokens[accepted])


class DraftSampler:
    """The draft's: one row at a time, the first most likely id when greedy, else drawn.

    With ``match`` it draws with the target's own uniforms of the position, so that the two often agree. With ``block``
    the probabilities of step ``i`` are written where the target's rule reads them, ``draft_probs[i]``; on a device,
    where rows are not always aligned, they are copied there. ``rule`` is the target's sampler of that rule.
    """

    def __init__(
        self,
        samplers: SlotSamplers,
        settings: Settings,
        num_prompt_tokens: int,
        vocab_size: int,
        rule: Binding | None,
    ) -> None:
        self._processing = Processing(samplers, settings, num_prompt_tokens, vocab_size)
        replaced = self._processing.replaced
        self._is_processed = bool(replaced)
        self._uniforms: Uniforms | None = None
        self._warps: list[Warp] = []
        variant = "processed" if replaced else ""
        if settings.is_greedy:
            self._heads = [samplers.sampler(MATCH, variant, replaced)]
            return
        self._uniforms = Uniforms(settings.seed or 0)
        self._by_position = settings.rule == MATCH
        self._rule = rule if samplers.is_async else None
        self._memory = samplers.memory
        rows: list[Memory | None] = [None]
        if rule is not None and not samplers.is_async:
            probs = rule.memory[DRAFT_PROBS]
            rows = [probs[i : i + 1] for i in range(len(probs) - 1)]
        self._heads = []
        for index, row in enumerate(rows):
            memory = {} if row is None else {PROBS: row}
            step = "" if row is None else f" row {index}"
            self._warps.append(warp_of(samplers, settings, variant + step, {**replaced, **memory}))
            self._heads.append(samplers.sampler(MATCH_SAMPLED, step, memory))
        self._random = samplers.host[UNIFORMS]  # [1, 3] f32

    @property
    def is_async(self) -> bool:
        """Whether an id can be drawn without the host's seeing those before it: nothing counts or looks at them."""
        return not self._is_processed

    def draw(self, width: int, committed: Sequence[int], drafted: Sequence[int]) -> int | None:
        """The next id after ``committed`` and ``drafted``, whose logits the last pass of ``width`` tokens gave.

        None when processors leave no id there. After ids that come late the next one does too.
        """
        if self._is_processed and self._processing.run(width, 1, committed, drafted, ()) == 0:
            return None
        step = len(drafted) if len(self._heads) > 1 else 0  # a sampler for each row of q, or one for all
        if self._uniforms is not None:
            self._warps[step].run(width, 1)
            if self._by_position:
                self._random[:] = self._uniforms.at_positions(len(committed) + len(drafted), 1)
            else:
                self._random[:] = self._uniforms.of_round(DRAFT, len(committed), len(drafted) + 1)[-1]
            self._heads[0].upload(UNIFORMS)
            if self._rule is not None:
                probs = self._memory[PROBS]  # [1, V] f32
                self._rule.take(DRAFT_PROBS, len(drafted) * probs.shape[1], probs)
        sampler = self._heads[step]
        sampler.run(width, 1)
        if isinstance(drafted, DeferredTokens):
            drafted.take(sampler.memory[TOKENS])
            return UNKNOWN
        return int(sampler.read(TOKENS)[0][0])


def draft_probs(samplers: SlotSamplers, settings: Settings) -> Binding | None:
    """The sampler whose ``draft_probs`` [max_rows, V] f32 the rule of ``settings`` reads; None where it needs none."""
    return None if settings.rule == MATCH else samplers.sampler(settings.rule)


def warp_of(samplers: SlotSamplers, settings: Settings, variant: str, replaced: Mapping[str, Memory]) -> Warp:
    """The warp of ``settings``, its parameters written."""
    names = (SOFTMAX,) if not settings.filters else _FILTERS[settings.top_k > NUM_SORTED :]
    warp = Warp(samplers, names, variant, replaced)
    samplers.write({TEMPERATURE: settings.temperature})
    if settings.filters:
        samplers.write({TOP_K: settings.top_k, TOP_P: settings.top_p, MIN_P: settings.min_p})
    return warp
