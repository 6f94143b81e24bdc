"""The controller: chooses in each round the source and length of the draft that are fastest on this machine and text.

The choice maximizes expected committed tokens per ms, (1 + a_1 + a_1 a_2 + ...) / (T(K + 1) + D(K)), over K, over the
sources at hand and over plain decoding. Acceptance a_i and times T, D come from earlier rounds. A decision depends on
committed tokens and on times, never on random draws of the coming round, so it does not bias the output.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specrt.runtime.drafting.acceptance import Acceptance, expected_tokens
from specrt.runtime.drafting.deferred import DeferredTokens
from specrt.runtime.drafting.drafters import DeferredDrafter, ModelDrafter, NGramDrafter
from specrt.runtime.drafting.latency import FurtherReads, LatencyModel
from specrt.runtime.sampling.grammar import Constraint

MODEL = "model"
# One n-gram source per range of matched suffix lengths; each entry is the shortest length of its range.
NGRAM_LENGTHS = (8, 4, 3, 2, 1)
# Acceptance by source, until it is measured.
ASSUMED = {MODEL: 0.7, "ngram-8": 0.85, "ngram-4": 0.7, "ngram-3": 0.5, "ngram-2": 0.4, "ngram-1": 0.2}
_LONG_MEMORY = 0.995  # for the acceptance that the next generation starts from
_LONG_WEIGHT = 8.0  # of its prior: one text, or one round of it, predicts little about the next text
_FIRST_PROBE, _LAST_PROBE = 8, 64  # plain rounds between two trials of a draft model that is too slow
_UNUSED_MEMORY = 0.97  # for rounds without the model: its acceptance moves back to the average over all texts
_WIDEST_OBSERVED = 16  # draft passes that catch up with more tokens are not timed
_CATCH_UP_TOKENS = 16  # the cost of catching up is spread over these: a lookup may soon leave the draft behind again
_WORTH = 1.08  # times plain decoding: the speed expected of a draft before it is fed a long text
_EXPECTED_TOKENS = 128  # most answers end before max_new_tokens, so at most this many are expected to follow
_PROBE_SHARE = 0.05  # share of the remaining time that a trial may take


def ngram_source(size: int) -> str:
    """The source's name for a suffix of ``size`` tokens, 1 or more."""
    return f"ngram-{next(length for length in NGRAM_LENGTHS if size >= length)}"


@dataclass
class OnlineEstimates:
    """Latencies and acceptance rates, kept by a runtime across generations. Starts from a tuning, if there is one."""

    k: int
    target: LatencyModel
    draft: LatencyModel
    acceptance: dict[str, Acceptance] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        k: int,
        slopes: tuple[float, float],
        target_ms: Mapping[str, float] | None = None,
        draft_ms: Mapping[str, float] | None = None,
        rates: Mapping[str, Sequence[float]] | None = None,
        further_reads: tuple[FurtherReads | None, FurtherReads | None] = (None, None),
    ) -> OnlineEstimates:
        """Estimates for K up to ``k``. ``slopes`` and ``further_reads`` are for the ``LatencyModel`` of target and
        draft, the rest is as in a ``Tuning``."""
        priors = {source: (rates or {}).get(source) or [rate] for source, rate in ASSUMED.items()}
        acceptance = {source: Acceptance(k, prior, _LONG_MEMORY, _LONG_WEIGHT) for source, prior in priors.items()}
        target, draft = (
            LatencyModel(slope, {int(width): ms for width, ms in (measured or {}).items()}, reads)
            for slope, measured, reads in zip(slopes, (target_ms, draft_ms), further_reads, strict=True)
        )
        return cls(k, target, draft, acceptance)


@dataclass(frozen=True)
class _Choice:
    """K tokens from ``source``, expected to give ``rate`` tokens per ms."""

    source: str | None
    k: int
    rate: float


_PLAIN = _Choice(None, 0, 0.0)


class _Proposed(NamedTuple):
    """A draft: ``num_own`` ids of ``source``; ``num_drafted`` also counts those that a grammar forced after them."""

    source: str | None
    num_own: int
    num_drafted: int
    num_committed: int
    time: float


class AdaptiveDrafter:
    """A ``Drafter`` that chooses in each round between an n-gram lookup, a draft model and no draft.

    ``min_width`` is the narrowest pass of the target. The time from a proposal to its commit counts as the target's.
    With deferred ids that time includes the draft's passes, whose duration is measured on the device. ``end`` is the
    largest possible length of the text: a draft model whose cache lags behind is used only if the remaining tokens
    can pay for catching up. With a ``constraint``, ids that it forces are appended to those of a lookup or of no draft.
    """

    def __init__(
        self,
        ngram: NGramDrafter | None,
        model: ModelDrafter | None,
        estimates: OnlineEstimates,
        min_width: int = 1,
        clock: Callable[[], float] = time.perf_counter,
        end: int | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        self._ngram, self._model, self._estimates, self._min_width = ngram, model, estimates, min_width
        self._clock, self._end, self._constraint = clock, end, constraint
        self._acceptance = {
            source: Acceptance(estimates.k, known.rates()) for source, known in estimates.acceptance.items()
        }
        self.is_sampled = False
        self._late: tuple[int, float] | None = None  # tokens of its first pass, start time
        self._plain_rounds, self._wait = 0, _FIRST_PROBE
        self._proposed: _Proposed | None = None

    def prefill(self, committed: Sequence[int]) -> None:
        """Fill the draft model's cache, if the model is likely to be used."""
        if self._model is not None and self._is_model_likely(self._model, committed):
            self._model.prefill(committed)

    def propose(self, committed: Sequence[int], k: int) -> list[int]:
        """See ``specrt.runtime.drafting.drafters.Drafter``. ``k`` is 1 or more."""
        choice = self._choose(committed, k)
        drafted = self._draft(choice, committed)
        source = choice.source if drafted else None
        self.is_sampled = source == MODEL
        num_own = len(drafted)
        if self._constraint is not None and not self.is_sampled:
            drafted = self._constraint.extended(committed, drafted, k)
        self._proposed = _Proposed(source, min(num_own, len(drafted)), len(drafted), len(committed), self._clock())
        return drafted

    def rollback(self, num_committed: int) -> None:
        """See ``specrt.runtime.drafting.drafters.Drafter``: learn from the round, if this drafter was asked in it."""
        if self._model is not None:
            self._model.rollback(num_committed)
        if self._proposed is None:
            return
        source, num_own, num_drafted, before, since = self._proposed
        self._proposed = None
        target_ms = (self._clock() - since) * 1e3
        if self._late is not None and isinstance(self._model, DeferredDrafter):
            (pending, started), self._late = self._late, None
            draft_ms = self._model.last_ms
            if draft_ms is not None:
                self._observe_draft(pending, num_drafted, draft_ms)
                target_ms = max(target_ms + (since - started) * 1e3 - draft_ms, 0.0)
                self._observe_target(num_drafted, target_ms)
        else:
            self._observe_target(num_drafted, target_ms)
        if source is not None:
            for acceptance in (self._acceptance[source], self._estimates.acceptance[source]):
                acceptance.observe(num_own, min(num_committed - before - 1, num_own))
        if source == MODEL:
            self._plain_rounds = 0
        else:
            self._plain_rounds += 1
            self._acceptance[MODEL].fade(_UNUSED_MEMORY)
            self._estimates.acceptance[MODEL].fade(_LONG_MEMORY)

    def _observe_target(self, num_drafted: int, ms: float) -> None:
        self._estimates.target.observe(max(num_drafted + 1, self._min_width), ms)

    def _is_model_likely(self, model: ModelDrafter, committed: Sequence[int]) -> bool:
        """Whether the draft model is expected to be used, judging by estimates from before the first round."""
        estimates = self._estimates
        if not model.can_propose(committed):
            return False
        if not (estimates.target.is_known and estimates.draft.is_known):
            return True
        pending, left = model.num_pending(committed), self._num_left(committed)
        return self._best_of_model(estimates.k, pending, left).rate > self._least_rate(pending)

    def _least_rate(self, pending: int) -> float:
        """The least expected tokens per ms for which the draft model, whose cache lacks ``pending`` tokens, is used."""
        return (_WORTH if pending > _WIDEST_OBSERVED else 1.0) / self._target_ms(0)

    def _num_left(self, committed: Sequence[int]) -> int:
        """The expected number of tokens still to come."""
        left = _EXPECTED_TOKENS if self._end is None else self._end - len(committed)
        return max(1, min(left, _EXPECTED_TOKENS))

    def _draft(self, choice: _Choice, committed: Sequence[int]) -> list[int]:
        if choice.source is None:
            return []
        if choice.source != MODEL:
            assert self._ngram is not None
            return self._ngram.propose(committed, choice.k)
        assert self._model is not None
        pending, started = self._model.num_pending(committed), self._clock()
        drafted = self._model.propose(committed, choice.k)
        if isinstance(drafted, DeferredTokens):
            self._late = (pending, started) if drafted else None
        elif drafted:
            self._observe_draft(pending, len(drafted), (self._clock() - started) * 1e3)
        return drafted

    def _observe_draft(self, pending: int, num_drafted: int, ms: float) -> None:
        """Record the time of a draft whose first pass fed ``pending`` tokens and the others one each."""
        draft = self._estimates.draft
        if pending <= 2:
            draft.observe(1, ms / num_drafted)
        elif pending <= _WIDEST_OBSERVED and draft.is_known:
            draft.observe(pending, max(ms - (num_drafted - 1) * draft.ms(1), draft.ms(1) / 2))

    def _choose(self, committed: Sequence[int], k: int) -> _Choice:
        """The choice for the round after ``committed``, with at most ``k`` tokens."""
        size = self._ngram.suffix_length(committed) if self._ngram is not None else 0
        target, draft = self._estimates.target, self._estimates.draft
        model = self._model if self._model is not None and self._model.can_propose(committed) else None
        if not target.is_known:
            return _PLAIN  # the very first round: its time is the baseline for all comparisons
        if model is not None and not draft.is_known:
            return _Choice(MODEL, min(k, 4), 0.0)
        plain = _Choice(None, 0, 1 / self._target_ms(0))
        best = plain
        if size:
            best = max(plain, self._best(ngram_source(size), k, lambda _: 0.0), key=lambda choice: choice.rate)
        if model is None:
            return best
        pending, left = model.num_pending(committed), self._num_left(committed)
        drafted = self._best_of_model(k, pending, left)
        if drafted.rate > max(best.rate, self._least_rate(pending)):
            self._wait = _FIRST_PROBE
            return drafted
        may_probe = draft.ms(pending) <= _PROBE_SHARE * left * self._target_ms(0)
        return self._probe(drafted) if best is plain and may_probe else best

    def _probe(self, model: _Choice) -> _Choice:
        """Plain decoding is fastest. Still try the model at intervals: the text may have changed."""
        if self._plain_rounds < self._wait:
            return _PLAIN
        self._wait = min(2 * self._wait, _LAST_PROBE)
        return model

    def _best_of_model(self, k: int, pending: int, left: int) -> _Choice:
        """The best K of the model, whose cache lacks ``pending`` tokens, over the ``left`` tokens to come."""
        draft = self._estimates.draft
        further = draft.ms(1)
        best = self._best(MODEL, k, lambda n: n * further)
        tokens = left if pending > _WIDEST_OBSERVED else min(left, _CATCH_UP_TOKENS)
        catch_up_ms = max(0.0, draft.ms(pending) - further)
        return _Choice(MODEL, best.k, tokens / (catch_up_ms + tokens / best.rate))

    def _best(self, source: str, k: int, draft_ms: Callable[[int], float]) -> _Choice:
        """The best K of at least 1. ``draft_ms`` of K is what drafting takes."""
        tokens = expected_tokens(self._acceptance[source].rates()[:k])
        rates = [tokens[n] / (self._target_ms(n) + draft_ms(n)) for n in range(1, k + 1)]
        best = max(range(k), key=rates.__getitem__)
        return _Choice(source, best + 1, rates[best])

    def _target_ms(self, num_drafted: int) -> float:
        return self._estimates.target.ms(max(num_drafted + 1, self._min_width))
