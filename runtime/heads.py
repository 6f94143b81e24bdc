"""The heads of one model at work: graphs loaded when first needed, opened on the buffers of a slot."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence

from specrt.engines.heads import NUCLEUS_IS_LARGER, THRESHOLD
from specrt.engines.seam import Array, Binding, Engine
from specrt.engines.spec import INPUT_IDS, LOGITS, ROW_INDICES


class HeadEngines:
    """Head graphs by name. May be used from several threads."""

    def __init__(self, load: Callable[[str], Engine]) -> None:
        self._load = load
        self._engines: dict[str, Engine] = {}
        self._slots = itertools.count()
        self._lock = threading.Lock()

    def open(self, name: str, shared: Mapping[str, Array]) -> Binding:
        """A new binding of head ``name`` on ``shared`` memory; see ``Engine.open``."""
        with self._lock:
            if name not in self._engines:
                self._engines[name] = self._load(name)
            return self._engines[name].open(next(self._slots), shared)


class SlotHeads:
    """The heads of one slot. Every tensor name is one buffer: what a head leaves in it is what the next one reads."""

    def __init__(self, engines: HeadEngines, host: Mapping[str, Array]) -> None:
        self._engines = engines
        self._bindings: dict[tuple[str, str], Binding] = {}
        self.memory: dict[str, Array] = {name: host[name] for name in (LOGITS, INPUT_IDS, ROW_INDICES)}

    def head(self, name: str, variant: str = "", replaced: Mapping[str, Array] | None = None) -> Binding:
        """Head ``name``, opened once for each ``variant``, whose tensors in ``replaced`` lie in other memory."""
        key = (name, variant)
        if key not in self._bindings:
            binding = self._engines.open(name, {**self.memory, **(replaced or {})})
            self._bindings[key] = binding
            for tensor, array in binding.host.items():
                if tensor not in (replaced or {}):
                    self.memory.setdefault(tensor, array)
        return self._bindings[key]

    def close(self) -> None:
        """Close all bindings."""
        while self._bindings:
            self._bindings.popitem()[1].close()


class Warp:
    """Logits to probabilities: softmax, or filters.

    Filters sort only the most likely ids. Where the nucleus is larger, the next one sorts more, and the last finds its
    threshold without a sort; rows that fitted come out of it with the same bits. All are opened here, none in a round.
    """

    def __init__(self, heads: SlotHeads, names: Sequence[str], variant: str, replaced: Mapping[str, Array]) -> None:
        first = heads.head(names[0], variant, replaced)
        own = {tensor: first.host[tensor] for tensor in (NUCLEUS_IS_LARGER, THRESHOLD) if tensor in first.host}
        self._bindings = [first, *(heads.head(name, variant, {**replaced, **own}) for name in names[1:])]
        self._is_larger = own.get(NUCLEUS_IS_LARGER)

    def run(self, width: int, rows: int) -> None:
        """Write the probabilities of ``rows`` rows."""
        for binding in self._bindings:
            binding.run(width, rows)
            if self._is_larger is None or not self._is_larger[:rows].any():
                return
