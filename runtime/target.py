"""A cached model and its verifier: verdicts of the target on drafted ids, and the next ids of a draft."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrt.engines.contract import LOGITS
from specrt.engines.errors import ParityError
from specrt.engines.interface import Binding
from specrt.runtime.drafting.deferred import DeferredTokens, memory_of
from specrt.runtime.model import KVCachedModel
from specrt.runtime.sampling.logprobs import Logprobs, TokenLogprobs
from specrt.runtime.sampling.verifier import DraftSampler, Verifier


class Target:
    """The target of one generation. ``logprobs`` holds those of the last verdict, where they were asked for."""

    def __init__(self, model: KVCachedModel, verifier: Verifier, logprobs: Logprobs | None = None) -> None:
        self.model, self._verifier, self._logprobs = model, verifier, logprobs
        self.logprobs: list[TokenLogprobs] = []
        self._is_checked = False

    def verify(self, committed: Sequence[int], drafted: Sequence[int], is_sampled: bool = True) -> tuple[int, int]:
        """Feed what the cache lacks of ``committed``, and ``drafted``; return (accepted n, the target's next token).

        ``is_sampled`` as in ``specrt.runtime.drafting.drafters.Drafter``.

        Raises ``ValueError`` when the buffers cannot hold it, and ``ParityError`` when the first logits are not finite.
        """
        model = self.model
        width, rows = model.feed([*committed[model.kv_len :], *drafted], len(drafted) + 1, memory_of(drafted))
        if not self._is_checked:
            self._check_finite()
        accepted, token = self._verifier.verify(width, rows, committed, drafted, is_sampled)
        if isinstance(drafted, DeferredTokens):
            model.learn(len(committed), drafted)
        if self._logprobs is not None:
            self.logprobs = self._logprobs.of(width, rows, [*drafted[:accepted], token])
        return accepted, token

    @property
    def sampler(self) -> Binding:
        """See ``Verifier.sampler``."""
        return self._verifier.sampler

    def rollback(self, num_committed: int) -> None:
        """The sequence has ``num_committed`` tokens: forget the KV of what was drafted beyond them."""
        self.model.rollback(num_committed - 1)

    def _check_finite(self) -> None:
        """An overflow would otherwise look like a text of one token, with every draft accepted."""
        self._is_checked = True
        largest = self.model.read(LOGITS)[0][0].max()  # NaN if any is
        if not np.isfinite(largest):
            raise ParityError(
                f"target: the largest logit after the prompt is {largest} in {self.model.spec.dtype}, expected a finite"
                " one; export the bundle again with --dtype fp32"
            )


class Draft:
    """The draft model of one generation.

    ``verdict`` is the target's sampler, where ids may pass to the target without the host's seeing them: on one device.
    """

    def __init__(self, model: KVCachedModel, verifier: DraftSampler, verdict: Binding | None = None) -> None:
        self.model, self._verifier = model, verifier
        self._verdict = verdict if verifier.is_async else None
        self._drafted: tuple[int, Sequence[int]] = (0, ())  # from which position on, and what

    def begin(self) -> list[int]:
        """An empty list of drafted ids, to be filled by ``next``."""
        return [] if self._verdict is None else DeferredTokens(self._verdict)

    def next(self, committed: Sequence[int], drafted: Sequence[int]) -> int | None:
        """Feed what the cache lacks of ``committed`` and ``drafted``; return the id that the draft puts next.

        None when logits processors leave it none, ``UNKNOWN`` where it comes late.
        """
        beyond = max(0, self.model.kv_len - len(committed))
        width, _ = self.model.feed(self._pending(committed, drafted), 1, memory_of(drafted, beyond))
        self._drafted = (len(committed), drafted)
        return self._verifier.draw(width, committed, drafted)

    def prefill(self, committed: Sequence[int]) -> None:
        """Feed what the cache lacks of ``committed``."""
        self.model.prefill(self._pending(committed, ()))

    def rollback(self, num_committed: int) -> None:
        """The sequence has ``num_committed`` tokens: forget what was drafted beyond them."""
        if self._verdict is not None:
            self.model.learn(*self._drafted)
            self._drafted = (0, ())
        self.model.rollback(min(self.model.kv_len, num_committed - 1))

    def _pending(self, committed: Sequence[int], drafted: Sequence[int]) -> list[int]:
        kv_len = self.model.kv_len
        beyond = max(0, kv_len - len(committed))
        return [*committed[kv_len:], *drafted[beyond:]]
