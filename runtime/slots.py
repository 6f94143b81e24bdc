"""Slots: the memory of one sequence, for target and draft. It is kept and reused for prompts with the same prefix."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specrt.engines.contract import ModelSpec, model_contract
from specrt.engines.interface import Backend, Engine
from specrt.engines.manifest import ModelEntry
from specrt.engines.samplers import sampler_contract
from specrt.runtime.drafting.head import HeadModel
from specrt.runtime.model import KVCachedModel
from specrt.runtime.sampling.samplers import SamplerEngines, SlotSamplers


class LoadedModel:
    """A model's engine. Each slot opens a binding of it."""

    def __init__(self, backend: Backend, entry: ModelEntry) -> None:
        self.entry = entry
        self._engine = backend.load(entry.graph, model_contract(entry.spec))

    def open(self, kv_owner: KVCachedModel | None = None, head: HeadModel | None = None) -> KVCachedModel:
        """A model with a new, empty cache, or with the cache of ``kv_owner``. ``head`` reads its features."""
        model = KVCachedModel(self._engine, self.entry.spec, kv_owner, None if head is None else head.feature_memory)
        model.feature_reader = head
        return model

    def open_head(self) -> HeadModel:
        """A head, on whose memory its target is to be opened."""
        return HeadModel(self._engine, self.entry.spec)


def sampler_engines(backend: Backend, entry: ModelEntry, max_rows: int, vocab_size: int) -> SamplerEngines:
    """The samplers of a model, for up to ``max_rows`` rows and ``vocab_size`` probabilities.

    They run on one thread: waking others would take longer than a sampler does.
    """
    spec: ModelSpec = replace(entry.spec, max_rows=max_rows)

    def load(name: str) -> Engine:
        return backend.load(entry.samplers[name], sampler_contract(name, spec, vocab_size), threads=1)

    return SamplerEngines(load)


class SlotModel:
    """A model's cache in a slot, and its samplers there. No pass is narrower than ``min_width``."""

    def __init__(self, model: KVCachedModel, engines: SamplerEngines, min_width: int = 1) -> None:
        self.model, self._min_width = model, min_width
        self.samplers = SlotSamplers(engines, model.binding)

    def begin(self, prompt: Sequence[int], min_width: int) -> None:
        """Keep the cached prefix of ``prompt[:-1]`` and discard the rest of the cache."""
        self.model.min_width = max(min_width, self._min_width)
        self.model.rollback(self.model.reusable(prompt, self.model.min_width))

    def touch(self) -> None:
        """Write the memory of a new, empty cache on the CPU. Else the system provides a page at its first use."""
        if not self.model.binding.is_async:
            for array in self.model.binding.host.values():
                array.fill(0)

    def close(self) -> None:
        self.samplers.close()
        self.model.close()


@dataclass
class Slot:
    """The memory of one sequence. ``draft`` is opened when first needed, a head with the slot: it reads every pass."""

    target: SlotModel
    draft: SlotModel | None = None

    def forget(self) -> None:
        """Empty the caches. After an error on a device it is unknown which of the enqueued passes were run."""
        for part in (self.target, self.draft):
            if part is not None:
                part.model.rollback(0)

    def touch(self) -> None:
        """See ``SlotModel.touch``."""
        self.target.touch()
        if self.draft is not None:
            self.draft.touch()

    def close(self) -> None:
        self.target.close()
        if self.draft is not None:
            self.draft.close()


class SlotPool:
    """Idle slots. May be used from several threads."""

    def __init__(self, open_slot: Callable[[], Slot]) -> None:
        self._open_slot = open_slot
        self._idle: list[Slot] = []
        self._lock = threading.RLock()  # a dropped stream returns its slot in the thread that collects it

    def take(self, prompt: Sequence[int], min_width: int) -> Slot:
        """The idle slot with the longest reusable prefix of ``prompt``, or a new one if none is idle.

        Of slots that share as much, it is the one that was idle longest. Slots that would keep less than a third of
        their cache are not considered, except for the one that was idle longest: so a common beginning, such as a
        system prompt, does not cost a long conversation its cache.
        """
        with self._lock:
            if not self._idle:
                return self._open_slot()
            models = [slot.target.model for slot in self._idle]  # the one that was idle longest is first
            reusable = [model.reusable(prompt, min_width) for model in models]
            shared = [n if at == 0 or 3 * n >= models[at].kv_len else -1 for at, n in enumerate(reusable)]
            return self._idle.pop(shared.index(max(shared)))

    def give_back(self, slot: Slot) -> None:
        """Make ``slot`` idle."""
        with self._lock:
            self._idle.append(slot)

    def __len__(self) -> int:
        return len(self._idle)

    def close(self) -> None:
        """Close all idle slots."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()
