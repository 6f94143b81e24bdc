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

    def copy_prefix(self, source: SlotModel, prompt: Sequence[int], min_width: int) -> None:
        """Copy from ``source`` what its cache shares with ``prompt``, where that can be done and is more than here."""
        width = max(min_width, self._min_width)
        num_tokens = source.model.reusable(prompt, width)
        if self.model.can_copy and num_tokens > self.model.reusable(prompt, width):
            self.model.copy_prefix(source.model, num_tokens)

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
    """The memory of one sequence. ``draft`` is opened when first needed, a head with the slot: it reads every pass.

    ``num_prompt_tokens`` is the length of the last prompt; ``idle_since`` is the number of prompts before it was idle.
    """

    target: SlotModel
    draft: SlotModel | None = None
    num_prompt_tokens: int = 0
    idle_since: int = 0

    def loss(self, num_kept: int, num_prompts: int) -> float:
        """What is lost, in tokens to be read again, if all but the first ``num_kept`` are discarded.

        Nothing if the last prompt is kept: then its text goes on, or its answer is wanted once more. Else the other
        tokens, divided by the prompts since it was idle: the longer ago, the less likely its text goes on.
        """
        if num_kept >= self.num_prompt_tokens - 1:
            return 0.0
        return (self.target.model.kv_len - num_kept) / (1 + num_prompts - self.idle_since)

    def copy_prefix(self, source: Slot, prompt: Sequence[int], min_width: int) -> None:
        """Copy from ``source`` what it shares with ``prompt``."""
        self.target.copy_prefix(source.target, prompt, min_width)
        if self.draft is not None and source.draft is not None:
            self.draft.copy_prefix(source.draft, prompt, 1)

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
        self._num_prompts = 0
        self._lock = threading.RLock()  # a dropped stream returns its slot in the thread that collects it

    def take(self, prompt: Sequence[int], min_width: int) -> Slot:
        """The idle slot that costs least for ``prompt``, or a new one if none is idle.

        The cost is what has to be read of the prompt, and ``Slot.loss``. A prefix that another idle slot has is copied,
        which takes a small part of the time of reading it; where caches are on a device, it is read. Of slots that
        cost as much, it is the one that keeps most, then the one that was idle longest.
        """
        with self._lock:
            slot = self._chosen(prompt, min_width) if self._idle else self._open_slot()
            slot.num_prompt_tokens = len(prompt)
            self._num_prompts += 1
            return slot

    def _chosen(self, prompt: Sequence[int], min_width: int) -> Slot:
        kept = [slot.target.model.reusable(prompt, min_width) for slot in self._idle]
        source = self._idle[kept.index(max(kept))]
        can_copy = source.target.model.can_copy
        saved = [max(kept)] * len(kept) if can_copy else kept
        losses = [slot.loss(num_kept, self._num_prompts) for slot, num_kept in zip(self._idle, kept, strict=True)]
        at = min(range(len(kept)), key=lambda i: (losses[i] - saved[i], -kept[i]))
        slot = self._idle.pop(at)
        if can_copy and kept[at] < max(kept):
            slot.copy_prefix(source, prompt, min_width)
        return slot

    def give_back(self, slot: Slot) -> None:
        """Make ``slot`` idle."""
        with self._lock:
            slot.idle_since = self._num_prompts
            self._idle.append(slot)

    def __len__(self) -> int:
        return len(self._idle)

    def close(self) -> None:
        """Close all idle slots."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()
