"""Whether a draft's engine has ``decode``, a profile for passes of one token: decided by measured bytes.

With it the builder stores the weights of all matmuls twice, in another layout for one row, while ``verify`` and
``prefill`` share theirs. Without it a pass of one token runs in ``verify``, which copies keys and values of the cache;
each copy is written and read again. Where attention is an operator, ``decode`` copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from specrt.engines.contract import STANDARD_DIALECT, ModelSpec
from specrt.engines.manifest import ModelEntry
from specrt.engines.trt.layers import EngineLayers, cache_copies, copied_bytes
from specrt.engines.trt.profiles import DECODE, VERIFY
from specrt.engines.trt.record import Candidate

# A draft has the profile if that saves this part of the bytes that its passes of one token move.
_LEAST_SAVING = 0.1


class OneTokenPasses(NamedTuple):
    """Passes of one token of a draft: they read ``weights_bytes`` and the cache once."""

    spec: ModelSpec
    weights_bytes: int

    def moved_bytes(self, copied: int) -> int:
        """What a pass moves that copies ``copied`` bytes of the cache."""
        return self.weights_bytes + self.spec.kv_bytes + 2 * copied

    def gain(self, copied: int, left: int = 0) -> bool:
        """Whether it is worth storing weights twice to copy ``left`` bytes instead of ``copied``."""
        moved = self.moved_bytes(copied)
        return moved - self.moved_bytes(left) >= _LEAST_SAVING * moved

    @property
    def are_expected_to_gain(self) -> bool:
        """The same without a measurement: ``verify`` copies the whole cache, ``decode`` nothing."""
        return self.gain(self.spec.kv_bytes)

    def measured(self, engine: EngineLayers) -> Candidate:
        """What a pass of one token copies in ``engine``, in the narrowest of its profiles."""
        profile = DECODE if DECODE in engine.layers else VERIFY
        copies = cache_copies(
            engine.layers[profile], self.spec.capacity, min(layer.head_dim for layer in self.spec.kv_layers)
        )
        return Candidate(tuple(engine.layers), engine.weights_bytes, copied_bytes(copies, 1))


def one_token_passes(role: str, entry: ModelEntry) -> OneTokenPasses | None:
    """Those of a draft. None where the profile is not considered.

    A target's run only without a draft. In the dialect ``standard-22`` every pass writes the whole cache.
    """
    considered = role == "draft" and entry.spec.dialect == STANDARD_DIALECT
    return OneTokenPasses(entry.spec, entry.bytes_per_pass) if considered else None


class Built(NamedTuple):
    """An engine, whether it has ``decode``, and its layers if the builder lists them."""

    plan: memoryview
    has_decode: bool
    layers: EngineLayers | None


def choose(passes: OneTokenPasses, build: Callable[[bool], Built]) -> tuple[Built, tuple[Candidate, ...]]:
    """The better of the engines that ``build(has_decode)`` makes, and what was measured of each.

    The second one, with ``decode``, is built only if the copies of the first one are worth it.
    """
    without = build(False)
    if without.layers is None:
        return build(True) if passes.are_expected_to_gain else without, ()
    first = passes.measured(without.layers)
    if not passes.gain(first.copied_bytes):
        return without, (first,)
    having = build(True)
    if having.layers is None:
        return having, (first,)
    second = passes.measured(having.layers)
    is_better = passes.gain(first.copied_bytes, second.copied_bytes)
    return having if is_better else without, (first, second)


def described(passes: OneTokenPasses, candidates: tuple[Candidate, ...], has_decode: bool) -> str:
    """The decision in one line, in MB."""
    parts = [
        f"{'with' if DECODE in c.profiles else 'without'} decode {c.copied_bytes / 1e6:.1f} MB of the cache copied and "
        f"{passes.moved_bytes(c.copied_bytes) / 1e6:.1f} MB moved, {c.weights_bytes / 1e6:.1f} MB of weights"
        for c in candidates
    ]
    return f"a pass of one token, measured {'; '.join(parts)}: built {'with' if has_decode else 'without'} it"
