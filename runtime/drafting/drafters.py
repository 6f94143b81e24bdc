"""Where drafts come from, behind an interface of two methods: ``propose(committed, k)`` and
``rollback(num_committed)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specrt.runtime.target import Draft


class Drafter(Protocol):
    """A source of drafts for one sequence.

    ``is_sampled``: the tokens last proposed were drawn from probabilities, which are where the target's rule reads
    them. Where not, each is certain to the draft, and no rule accepts more than ``match``.
    """

    @property
    def is_sampled(self) -> bool: ...

    def propose(self, committed: Sequence[int], k: int) -> list[int]:
        """At most ``k`` tokens that may follow ``committed``; fewer where it has none. ``k = 0`` only catches up.

        Ids that come late are known after the verdict on them.
        """
        ...

    def rollback(self, num_committed: int) -> None:
        """The sequence now has ``num_committed`` tokens: forget what was drafted beyond them."""
        ...


class NoDrafter:
    """Drafts nothing: plain decoding."""

    is_sampled = True

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
    On a device the ids come late (``specrt.runtime.drafting.deferred``): the host does not wait for them.
    """

    is_sampled = True

    def __init__(self, draft: Draft, target_vocab_size: int) -> None:
        self._draft = draft
        self._vocab_size = target_vocab_size

    def propose(self, committed: Sequence[int], k: int) -> list[int]:
        """See ``Drafter.propose``."""
        if not self.can_propose(committed):
            return []
        room = self._draft.model.spec.max_seq_len - len(committed)
        if k == 0:
            self._draft.prefill(committed)
            return []
        drafted = self._draft.begin()
        self._draft.model.binding.mark(0)
        for _ in range(min(k, room + 1)):
            token = self._draft.next(committed, drafted)
            if token is None or token >= self._vocab_size:
                break
            drafted.append(token)
        self._draft.model.binding.mark(1)
        return drafted

    @property
    def last_ms(self) -> float | None:
        """What the last draft took in ms; None while that is not known: ids that come late are judged first."""
        return self._draft.model.binding.elapsed_ms()

    def rollback(self, num_committed: int) -> None:
        """See ``Drafter.rollback``."""
        self._draft.rollback(num_committed)

    def can_propose(self, committed: Sequence[int]) -> bool:
        """Whether the model's context holds ``committed``, and its vocabulary what the cache lacks of it."""
        model = self._draft.model
        model.follow()
        pending = committed[model.kv_len :]
        return len(committed) <= model.spec.max_seq_len and model.spec.knows(max(pending, default=0))

    def num_pending(self, committed: Sequence[int]) -> int:
        """How many of ``committed`` its cache lacks."""
        self._draft.model.follow()
        return len(committed) - min(self._draft.model.kv_len, len(committed))


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
