"""The samplers of one model at work: graphs loaded when first needed, opened on the buffers of a slot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from specrt.engines.contract import INPUT_IDS, LOGITS, ROW_INDICES
from specrt.engines.interface import Array, Binding, Engine, Memory
from specrt.engines.samplers import (
    FILTER,
    FILTER_WIDE,
    MIN_P,
    NUCLEUS,
    NUCLEUS_IS_LARGER,
    NUM_SORTED,
    PROBS,
    SOFTMAX,
    TEMPERATURE,
    THRESHOLD,
    TOP_K,
    TOP_P,
)
from specrt.runtime.settings import Settings

_FILTERS = (FILTER, FILTER_WIDE, NUCLEUS)  # each takes the rows that the one before it could not


class SamplerEngines:
    """Sampler graphs by name. May be used from several threads."""

    def __init__(self, load: Callable[[str], Engine]) -> None:
        self._load = load
        self._engines: dict[str, Engine] = {}
        self._lock = threading.Lock()

    def open(self, name: str, shared: Mapping[str, Memory]) -> Binding:
        """A new binding of sampler ``name`` on ``shared`` memory; see ``Engine.open``."""
        with self._lock:
            if name not in self._engines:
                self._engines[name] = self._load(name)
            return self._engines[name].open(shared)


class SlotSamplers:
    """The samplers of one slot. Every tensor name is one buffer: what a sampler leaves in it is what the next one
    reads.

    ``model`` is the binding whose passes they verify. ``host`` holds what the host writes, of all samplers together.
    """

    def __init__(self, engines: SamplerEngines, model: Binding) -> None:
        self._engines = engines
        self._bindings: dict[tuple[str, str], Binding] = {}
        self.model = model
        self.is_async = model.is_async
        self.memory: dict[str, Memory] = {name: model.memory[name] for name in (LOGITS, INPUT_IDS, ROW_INDICES)}
        self.host: dict[str, Array] = {}
        self._writers: dict[str, Binding] = {}

    def sampler(self, name: str, variant: str = "", replaced: Mapping[str, Memory] | None = None) -> Binding:
        """Sampler ``name``, opened once for each ``variant``, whose tensors in ``replaced`` are in other memory."""
        key = (name, variant)
        if key not in self._bindings:
            binding = self._engines.open(name, {**self.memory, **(replaced or {})})
            self._bindings[key] = binding
            for tensor, memory in binding.memory.items():
                if tensor not in (replaced or {}):
                    self.memory.setdefault(tensor, memory)
            for tensor, array in binding.host.items():
                self.host.setdefault(tensor, array)
                self._writers.setdefault(tensor, binding)
        return self._bindings[key]

    def write(self, values: Mapping[str, float]) -> None:
        """Fill tensors that the host writes, for passes from here on."""
        for name, value in values.items():
            self.host[name][:] = value
            self._writers[name].upload(name)

    def close(self) -> None:
        """Close all bindings."""
        while self._bindings:
            self._bindings.popitem()[1].close()


class Warp:
    """Logits to probabilities by the temperature and filters of ``settings``: softmax, or filters.

    Filters sort only the most likely ids. Where the nucleus is larger, the next one sorts more, and the last finds its
    threshold without a sort; rows that fitted come out of it with the same bits. All are opened here, none in a round.
    On a device nobody looks whether the nucleus is larger, since that would be to wait: the first and the last run.
    """

    def __init__(
        self, samplers: SlotSamplers, settings: Settings, variant: str, replaced: Mapping[str, Memory]
    ) -> None:
        names = (SOFTMAX,) if not settings.filters else _FILTERS[settings.top_k > NUM_SORTED :]
        first = samplers.sampler(names[0], variant, replaced)
        own = {tensor: first.memory[tensor] for tensor in (NUCLEUS_IS_LARGER, THRESHOLD) if tensor in first.memory}
        further = names[1:][-1:] if samplers.is_async else names[1:]
        self._bindings = [first, *(samplers.sampler(name, variant, {**replaced, **own}) for name in further)]
        self._looks = not samplers.is_async and bool(own)
        samplers.write({TEMPERATURE: settings.temperature})
        if settings.filters:
            samplers.write({TOP_K: settings.top_k, TOP_P: settings.top_p, MIN_P: settings.min_p})

    def write(self, probs: Array) -> None:
        """Take probabilities [R, V] f32 for those of a run."""
        self._bindings[0].write(PROBS, probs)

    def run(self, width: int, rows: int) -> None:
        """Write the probabilities of ``rows`` rows."""
        for binding in self._bindings:
            binding.run(width, rows)
            if self._looks and not binding.read(NUCLEUS_IS_LARGER)[0][:rows].any():
                return
