"""Where drafts come from, behind an interface of three methods: ``prefill``, ``propose`` and ``rollback``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specrt.engines.interface import Binding
from specrt.runtime.drafting.deferred import DeferredTokens
from specrt.runtime.model import UNKNOWN, KVCachedModel
from specrt.runtime.sampling.draft_sampler import DraftSampler


class Drafter(Protocol):
    """A source of drafts for one sequence.

    ``is_sampled``: the last proposed tokens were drawn from probabilities, which are in the memory that the target's
    rule reads. Otherwise the draft's distribution is a single token, and no rule accepts more than ``match``.
    """

    @property
    def is_sampled(self) -> bool: ...

    def prefill(self, committed: Sequence[int]) -> None:
        """Read ``committed``, the prompt, once before the first ``propose``."""
        ...

    def propose(self, committed: Sequence[int], k: int) -> list[int]:
        """At most ``k`` tokens that may follow ``committed``, or fewer.

        Deferred ids are known after their verification.
        """
        ...

    def rollback(self, num_committed: int) -> None:
        """The sequence now has ``num_committed`` tokens: discard the drafted ones beyond them."""
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
    """Drafts from a model with its own KV cache.

    It first feeds the committed tokens that its cache lacks, so full acceptance (where the last drafted token was never
    fed) and rounds without drafting need no special case. Beyond its context, and after a token outside its vocabulary,
    it proposes nothing. A draft ends at a token outside the target's vocabulary, or where no id is allowed. Ids that a
    grammar forces need no pass.
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
        if not pending or not self._can_feed(committed, pending):  # a head drafts after two tokens
            return []
        room = self.model.spec.max_seq_len - len(committed)
        return self._draft(committed, pending, min(k, room + 1))

    def rollback(self, num_committed: int) -> None:
        """See ``Drafter.rollback``."""
        self.model.rollback(min(self.model.kv_len, num_committed - 1))

    def can_propose(self, committed: Sequence[int]) -> bool:
        """Whether ``committed`` fits the model's context, and the tokens its cache lacks are in its vocabulary."""
        return self._can_feed(committed, self.model.missing(committed))

    def num_pending(self, committed: Sequence[int]) -> int:
        """How many of ``committed`` its cache lacks."""
        return len(self.model.missing(committed))

    def _draft(self, committed: Sequence[int], pending: Sequence[int], k: int) -> list[int]:
        drafted: list[int] = []
        for _ in range(k):
            width, _ = self.model.feed(pending, 1)
            token = self._sampler.draw(width, committed, drafted)
            if token is None or token >= self._vocab_size:
                break
            drafted.append(token)
            pending = (token,)
        return drafted

    def _can_feed(self, committed: Sequence[int], pending: Sequence[int]) -> bool:
        spec = self.model.spec
        return len(committed) <= spec.max_seq_len and spec.knows(max(pending, default=0))


class DeferredDrafter(ModelDrafter):
    """Drafts from a model on the target's device. The host does not wait for the ids; it reads them after verification.

    The constructor's ``sampler`` must not depend on drafted ids. The ids are kept in the memory of ``verdict``, a
    sampler of the target.
    """

    def __init__(self, model: KVCachedModel, sampler: DraftSampler, target_vocab_size: int, verdict: Binding) -> None:
        super().__init__(model, sampler, target_vocab_size)
        self._verdict = verdict
        self._drafted: tuple[int, Sequence[int]] = (0, ())  # first position, ids

    def rollback(self, num_committed: int) -> None:
        """See ``Drafter.rollback``."""
        self.model.learn(*self._drafted)
        self._drafted = (0, ())
        super().rollback(num_committed)

    @property
    def last_ms(self) -> float | None:
        """Duration of the last draft, after its verification; None if the device has not finished both marks."""
        return self.model.binding.elapsed_ms()

    def _draft(self, committed: Sequence[int], pending: Sequence[int], k: int) -> list[int]:
        drafted, late = DeferredTokens(self._verdict), None
        self._drafted = (len(committed), drafted)
        binding = self.model.binding
        with binding.together():
            binding.mark(0)
            for _ in range(k):
                width, _ = self.model.feed(pending, 1, late)
                self._sampler.draw(width, committed, drafted)
                drafted.append(UNKNOWN)
                pending, late = (UNKNOWN,), drafted.memory[len(drafted) - 1 : len(drafted)]
            binding.mark(1)
        return drafted


class NGramDrafter:
    """Drafts by looking up the longest suffix of the sequence at its latest earlier occurrence.

    Every n-gram of ``min_n .. max_n`` tokens is indexed once, when a token follows it. A copy that reaches the end of
    the sequence continues in its own draft, so repetition with a period shorter than K is drafted too.
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
        """Length of the longest indexed suffix of ``committed`` that occurs earlier in it; 0 if there is none."""
        self._index(committed)
        length = len(committed)
        sizes = (n for n in self._sizes if n <= length and tuple(committed[length - n :]) in self._next)
        return next(sizes, 0)

    def rollback(self, num_committed: int) -> None:
        """See ``Drafter.rollback``: only committed tokens were indexed, so there is nothing to discard."""

    def _index(self, committed: Sequence[int]) -> None:
        """Map each n-gram that ends before the last token to the position that follows it."""
        for end in range(self._indexed + 1, len(committed)):
            for size in self._sizes:
                if size <= end:
                    self._next[tuple(committed[end - size : end])] = end
        self._indexed = max(self._indexed, len(committed) - 1)
