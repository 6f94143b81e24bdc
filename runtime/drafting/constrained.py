"""Drafters under a grammar: no draft holds an id that it forbids, and ids that it forces are drafted without a pass."""

from __future__ import annotations

from collections.abc import Sequence

from specrt.runtime.drafting.drafters import Drafter, ModelDrafter, NGramDrafter, NoDrafter
from specrt.runtime.model import KVCachedModel
from specrt.runtime.sampling.draft_sampler import DraftSampler
from specrt.runtime.sampling.grammar import Constraint
from specrt.runtime.settings import Settings


class ConstrainedModelDrafter(ModelDrafter):
    """Drafts from a model whose ``sampler`` draws with the mask of ``constraint``. Forced ids have probability one."""

    def __init__(
        self, model: KVCachedModel, sampler: DraftSampler, target_vocab_size: int, constraint: Constraint
    ) -> None:
        super().__init__(model, sampler, target_vocab_size)
        self._constraint = constraint

    def _draft(self, committed: Sequence[int], pending: Sequence[int], k: int) -> list[int]:
        drafted: list[int] = []
        while len(drafted) < k and not self._constraint.is_complete(committed, drafted):
            token = self._constraint.forced(committed, drafted)
            if token is not None:
                self._sampler.put(token, drafted)
            else:
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


class ConstrainedDrafter:
    """The drafts of a drafter that does not sample, up to the first forbidden id, then the ids that are forced."""

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


def certain_drafter(settings: Settings, constraint: Constraint | None) -> Drafter:
    """An n-gram lookup or no draft, with the ids that the grammar forces."""
    drafter = NGramDrafter() if settings.draft == "ngram" else NoDrafter()
    return drafter if constraint is None else ConstrainedDrafter(drafter, constraint)
