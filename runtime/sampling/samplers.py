"""The samplers of one model: graphs are loaded when first needed and opened on the buffers of a slot."""

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

_FILTERS = (FILTER, FILTER_WIDE, NUCLEUS)  # each handles the rows that the previous one could not


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
    """The samplers of one slot. Each tensor name is one buffer, through which a sampler passes its result to the next.

    ``model`` is the binding whose passes they verify. ``host`` holds the tensors that the host writes, of all samplers.
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
        """Sampler ``name``, opened once for each ``variant``. Tensors in ``replaced`` use that memory instead."""
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
        """Fill tensors that the host writes. Takes effect from the next pass on."""
        for name, value in values.items():
            self.host[name][:] = value
            self._writers[name].upload(name)

    def close(self) -> None:
        """Close all bindings."""
        while self._bindings:
            self._bindings.popitem()[1].close()


class Warp:
    """Logits to probabilities with the temperature and filters of ``settings``: softmax, or filters.

    Filters sort only the most likely ids. If the nucleus is larger, the next filter sorts more, and the last one finds
    the threshold without sorting; it returns the same bits for rows that were complete. All are opened here, none in a
    round. On a device the first and the last always run: checking whether the nucleus is larger would be a wait.
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
        """Set the probabilities [R, V] f32, instead of a run."""
        self._bindings[0].write(PROBS, probs)

    def run(self, width: int, rows: int) -> None:
        """Write the probabilities of ``rows`` rows."""
        for binding in self._bindings:
            binding.run(width, rows)
            if self._looks and not binding.read(NUCLEUS_IS_LARGER)[0][:rows].any():
                return
