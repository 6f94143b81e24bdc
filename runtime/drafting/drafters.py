"""Where drafts come from, behind an interface of three methods: ``prefill``, ``propose`` and ``rollback``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specrt.engines.interface import Binding
from specrt.runtime.drafting.deferred import DeferredTokens
from specrt.runtime.model import UNKNOWN, KVCachedModel
from specrt.runtime.sampling.draft_sampler import DraftSampler
from specrt.runtime.sampling.grammar import Constraint


class Drafter(Protocol):
    """A source of drafts for one sequence.

    ``is_sampled``: the tokens last proposed were drawn from probabilities, which are where the target's rule reads
    them. Where not, each is certain to the draft, and no rule accepts more than ``match``.
    """

    @property
    def is_sampled(self) -> bool: ...

    def prefill(self, committed: Sequence[int]) -> None:
        """Read ``committed``, the prompt, once before the first ``propose``."""
        ...

    def propose(self, committed: Sequence[int], k: int) -> list[int]:
        """At most ``k`` tokens that may follow ``committed``; fewer where it has none.

        Ids that come late are known after the verdict on them.
        """
        ...

    def rollback(self, num_committed: int) -> None:
        """The sequence now has ``num_committed`` tokens: forget what was drafted beyond them."""
        ...


class NoDrafter:
    """Drafts nothing: plain decoding."""

    is_sampled = True

    def prefill(self, committed: Sequence[int]) -> None:
        """See ``Drafter.prefill``."""

    def propose(self, committed: Sequence[int], k: int) -> list[int]:
        """See ``Drafter.propose``."""
        return []

    def rollback(self, num_committed: int) -> None:
        """See ``Drafter.rollback``."""


class ModelDrafter:
    """Drafts of a model with a KV cache of its own.

    It feeds what its cache lacks of ``committed`` first, so full acceptance (whose last drafted token was never fed)
    and rounds without drafting need no special case. Beyond its own context, and after a token that it does not know,
    it proposes nothing. Tokens the target does not know end a draft, and so does a place without an allowed id.
    An id that a grammar forces takes no pass.
    """

    is_sampled = True

    def __init__(self, model: KVCachedModel, sampler: DraftSampler, target_vocab_size: int) -> None:
        self.model, self._sampler = model, sampler
        self._vocab_size = target_vocab_size

    def prefill(self, committed: Sequence[int]) -> None:
        """See ``Drafter.prefill``."""
        pending = self.model.missing(committed)
        if self._can_feed(committed, pending):
            self.model.prefill(pending)

    def propose(self, committed: Sequence[int], k: int) -> list[int]:
        """See ``Drafter.propose``."""
        pending = self.model.missing(committed)
        if not self._can_feed(committed, pending):
            return []
        room = self.model.spec.max_seq_len - len(committed)
        return self._draft(committed, pending, min(k, room + 1))

    def rollback(self, num_committed: int) -> None:
        """See ``Drafter.rollback``."""
        self.model.rollback(min(self.model.kv_len, num_committed - 1))

    def can_propose(self, committed: Sequence[int]) -> bool:
        """Whether the model's context holds ``committed``, and its vocabulary what the cache lacks of it."""
        return self._can_feed(committed, self.model.missing(committed))

    def num_pending(self, committed: Sequence[int]) -> int:
        """How many of ``committed`` its cache lacks."""
        return len(self.model.missing(committed))

    def _draft(self, committed: Sequence[int], pending: Sequence[int], k: int) -> list[int]:
        drafted: list[int] = []
        for _ in range(k):
            if self._sampler.is_complete(committed, drafted):
                break
            token = self._sampler.forced(committed, drafted)
            if token is None:
                width, _ = self.model.feed(pending, 1)
                pending = ()
                token = self._sampler.draw(width, committed, drafted)
            if token is None or token >= self._vocab_size:
                break
            drafted.append(token)
            pending = (*pending, token)
            if not self.model.spec.knows(token):
                break
        return drafted

    def _can_feed(self, committed: Sequence[int], pending: Sequence[int]) -> bool:
        spec = self.model.spec
        return len(committed) <= spec.max_seq_len and spec.knows(max(pending, default=0))


class DeferredDrafter(ModelDrafter):
    """Drafts of a model on the target's device. The host does not wait for the ids: they are known with the verdict.

    ``sampler`` of the constructor must not depend on drafted ids; ``verdict`` is a sampler of the target, in whose
    memory the ids are kept.
    """

    def __init__(self, model: KVCachedModel, sampler: DraftSampler, target_vocab_size: int, verdict: Binding) -> None:
        super().__init__(model, sampler, target_vocab_size)
        self._verdict = verdict
        self._drafted: tuple[int, Sequence[int]] = (0, ())  # from which position on, and what

    def rollback(self, num_committed: int) -> None:
        """See ``Drafter.rollback``."""
        self.model.learn(*self._drafted)
        self._drafted = (0, ())
        super().rollback(num_committed)

    @property
    def last_ms(self) -> float | None:
        """What the last draft took in ms, asked after the verdict on it; None where the device does not know it yet."""
        return self.model.binding.elapsed_ms()

    def _draft(self, committed: Sequence[int], pending: Sequence[int], k: int) -> list[int]:
        drafted, late = DeferredTokens(self._verdict), None
        self._drafted = (len(committed), drafted)
        self.model.binding.mark(0)
        for _ in range(k):
            width, _ = self.model.feed(pending, 1, late)
            self._sampler.draw(width, committed, drafted)
            drafted.append(UNKNOWN)
            pending, late = (UNKNOWN,), drafted.memory[len(drafted) - 1 : len(drafted)]
        self.model.binding.mark(1)
        return drafted


class ConstrainedDrafter:
    """The certain drafts of another up to the first id that a grammar forbids, and the ids that it forces then."""

    is_sampled = False

    def __init__(self, drafter: Drafter, constraint: Constraint) -> None:
        self._drafter, self._constraint = drafter, constraint

    def prefill(self, committed: Sequence[int]) -> None:
        """See ``Drafter.prefill``."""
        self._drafter.prefill(committed)

    def propose(self, committed: Sequence[int], k: int) -> list[int]:
        """See ``Drafter.propose``."""
        return self._constraint.extended(committed, self._drafter.propose(committed, k), k)

    def rollback(self, num_committed: int) -> None:
        """See ``Drafter.rollback``."""
        self._drafter.rollback(num_committed)


class NGramDrafter:
    """Drafts by looking up the longest suffix of the sequence at its latest earlier occurrence.

    Every n-gram of ``min_n .. max_n`` tokens is indexed once, when a token follows it. A copy that reaches the end of
    the sequence goes on in its own draft, so a period shorter than K is continued.
    """

    is_sampled = False

    def __init__(self, max_n: int = 4, min_n: int = 2) -> None:
        self._sizes = range(max_n, min_n - 1, -1)
        self._next: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def prefill(self, committed: Sequence[int]) -> None:
        """See ``Drafter.prefill``."""
        self._index(committed)

    def propose(self, committed: Sequence[int], k: int) -> list[int]:
        """See ``Drafter.propose``."""
        length = len(committed)
        size = self.suffix_length(committed)
        if not size:
            return []
        source = self._next[tuple(committed[length - size :])]
        drafted: list[int] = []
        for position in range(source, source + k):
            drafted.append(committed[position] if position < length else drafted[position - length])
        return drafted

    def suffix_length(self, committed: Sequence[int]) -> int:
        """How many tokens at the end of ``committed`` occur earlier in it, as far as is compared; 0 for too few."""
        self._index(committed)
        length = len(committed)
        sizes = (n for n in self._sizes if n <= length and tuple(committed[length - n :]) in self._next)
        return next(sizes, 0)

    def rollback(self, num_committed: int) -> None:
        """See ``Drafter.rollback``: only committed tokens were indexed, so there is nothing to forget."""

    def _index(self, committed: Sequence[int]) -> None:
        """Map each n-gram that ends before the last token to the position that follows it."""
        for end in range(self._indexed + 1, len(committed)):
            for size in self._sizes:
                if size <= end:
                    self._next[tuple(committed[end - size : end])] = end
        self._indexed = max(self._indexed, len(committed) - 1)
