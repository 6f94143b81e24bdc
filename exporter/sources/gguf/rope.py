"""Rotary embeddings of a GGUF file as transformers' ``rope_parameters``: its keys, and its tensors of factors.

llama.cpp rotates pair i at position p by p / (factor_i base^(2 i / d)), divided by the scale of ``linear``; ``yarn``
mixes the scaled and the unscaled angle by a ramp. transformers computes the same with these ``rope_parameters``.
Tensors of factors (``rope_freqs``, Llama 3.1) become ``longrope`` with the same factors for every length, which divides
the frequencies by them and does nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from specrt.engines.errors import SourceError, UnsupportedModelError
from specrt.exporter.sources.gguf.file import GgufFile

FACTORS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_PREFIX = "rope.scaling."
ROPE_KEYS = frozenset(  # all read below except "finetuned", which llama.cpp prints and does not use
    ["rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "rope.scale_linear"]
    + [f"{_PREFIX}{name}" for name in ("type", "factor", "attn_factor", "original_context_length", "finetuned")]
    + [f"{_PREFIX}yarn_{name}" for name in ("log_multiplier", "ext_factor", "attn_factor", "beta_fast", "beta_slow")]
)
# Neutral values of the yarn keys that transformers computes in another way or not at all.
_NEUTRAL = {"yarn_ext_factor": (1.0, -1.0), "yarn_attn_factor": (1.0,)}
_ELSEWHERE = "export the model from its Hugging Face folder instead"


@dataclass(frozen=True)
class Rope:
    """Transformers' ``parameters``, the ``share`` of a head's dimensions that rotate, and the sliding layers' base."""

    parameters: dict[str, Any]
    share: float
    local_theta: float | None


@dataclass(frozen=True)
class _Keys:
    """The rope keys of a file by name, with llama.cpp's defaults."""

    gguf: GgufFile
    stated: dict[str, Any]

    def number(self, key: str, default: float) -> float:
        value = self.stated.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise SourceError(f"{self.name(key)} is {value!r}, expected a number; convert the model again")
        return float(value)

    def name(self, key: str) -> str:
        return f"{self.gguf.path}: {self.gguf.architecture}.{key}"

    def scaling(self, key: str, default: float) -> float:
        return self.number(f"{_PREFIX}{key}", default)


def rope_of(gguf: GgufFile, head_dim: int, context_length: int) -> Rope:
    """The rope that ``gguf`` states for heads of ``head_dim``.

    Raises ``UnsupportedModelError`` for what transformers does not compute, ``SourceError`` for impossible values.
    """
    keys = _Keys(gguf, gguf.of_architecture())
    num_dims = int(keys.number("rope.dimension_count", head_dim))
    if not 0 < num_dims <= head_dim or num_dims % 2:
        raise SourceError(
            f"{keys.name('rope.dimension_count')} is {num_dims}, expected an even number up to the head size {head_dim}"
        )
    theta = keys.number("rope.freq_base", 10000.0)
    parameters = {"rope_theta": theta, **_scaling(keys, num_dims, context_length)}
    local = keys.number("rope.freq_base_swa", 0.0) if "rope.freq_base_swa" in keys.stated else None
    return Rope(parameters, _share(num_dims, head_dim), local)


def _share(num_dims: int, head_dim: int) -> float:
    """The fraction that transformers, which truncates its product with ``head_dim``, turns back into ``num_dims``."""
    share = num_dims / head_dim
    return share if int(head_dim * share) == num_dims else math.nextafter(share, math.inf)


def _scaling(keys: _Keys, num_dims: int, context_length: int) -> dict[str, Any]:
    """``rope_type`` and its parameters."""
    kind = keys.stated.get(f"{_PREFIX}type", "linear")  # llama.cpp's default: a factor alone is linear
    factor = keys.scaling("factor", keys.number("rope.scale_linear", 1.0)) or 1.0
    if factor < 0:
        raise SourceError(f"{keys.name('rope.scaling.factor')} is {factor}, expected a positive number")
    attention = keys.scaling("attn_factor", 1.0)
    original = int(keys.scaling("original_context_length", 0) or context_length)
    if kind == "none":
        factor = 1.0
    elif kind == "yarn":
        return _yarn(keys, factor, attention, original)
    elif kind not in ("linear", "longrope"):
        raise UnsupportedModelError(f"{keys.name('rope.scaling.type')} is {kind!r}, which is not known; {_ELSEWHERE}")
    short, long = _factors(keys, num_dims, kind == "longrope")
    if short is None or long is None:
        if attention != 1.0:
            raise UnsupportedModelError(
                f"{keys.name('rope.scaling.attn_factor')} is {attention:g}, which transformers has with yarn or "
                f"longrope only; {_ELSEWHERE}"
            )
        return {"rope_type": "default"} if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    return {
        "rope_type": "longrope",
        "short_factor": [value * factor for value in short],
        "long_factor": [value * factor for value in long],
        "attention_factor": attention,
        "factor": 1.0,
        "original_max_position_embeddings": original,
    }


def _factors(keys: _Keys, num_dims: int, is_longrope: bool) -> tuple[list[float] | None, list[float] | None]:
    """(factors up to the original length, beyond it), or None where there are none."""
    present = [name for name in (FACTORS, SHORT, LONG) if name in keys.gguf.tensors]
    if present == [FACTORS]:
        values = _values(keys, FACTORS, num_dims)
        return (None, None) if set(values) == {1.0} else (values, values)
    if present == [SHORT, LONG]:
        return _values(keys, SHORT, num_dims), _values(keys, LONG, num_dims)
    if present:
        raise UnsupportedModelError(
            f"{keys.gguf.path}: of the rope factors only {' and '.join(present)}: expected {FACTORS}, or {SHORT} and "
            f"{LONG}; {_ELSEWHERE}"
        )
    if is_longrope:
        raise SourceError(f"{keys.gguf.path}: rope scaling is longrope, and {SHORT} and {LONG} are missing")
    return None, None


def _values(keys: _Keys, name: str, num_dims: int) -> list[float]:
    values = keys.gguf.floats(name)
    if len(values) != num_dims // 2 or not all(math.isfinite(value) and value > 0 for value in values):
        raise SourceError(
            f"{keys.gguf.path}: {name} has {len(values)} values, expected {num_dims // 2} positive numbers; "
            "convert the model again"
        )
    return [float(value) for value in values]


def _yarn(keys: _Keys, factor: float, attention: float, original: int) -> dict[str, Any]:
    """YaRN (arXiv 2309.00071). llama.cpp scales cos and sin by 0.1 ln(factor) + 1, as transformers does."""
    for name, values in _NEUTRAL.items():
        if (value := keys.scaling(name, values[0])) not in values:
            raise UnsupportedModelError(
                f"{keys.name(_PREFIX + name)} is {value:g}, which transformers does not compute; {_ELSEWHERE}"
            )
    if factor < 1.0:
        raise SourceError(f"{keys.name('rope.scaling.factor')} is {factor:g}, expected at least 1 with yarn")
    if any(name in keys.gguf.tensors for name in (FACTORS, SHORT, LONG)):
        raise UnsupportedModelError(
            f"{keys.gguf.path}: yarn and a tensor of rope factors, which transformers cannot combine; {_ELSEWHERE}"
        )
    fast, slow = keys.scaling("yarn_beta_fast", 32.0), keys.scaling("yarn_beta_slow", 1.0)
    if not fast > slow > 0:
        raise SourceError(
            f"{keys.name('rope.scaling.yarn_beta_fast')} is {fast:g}, expected more than beta_slow {slow:g}"
        )
    multiplier = keys.scaling("yarn_log_multiplier", 0.0)
    scale = _mscale(factor, 1.0) / (_mscale(factor, multiplier) if multiplier else 1.0)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": scale * attention,
        "beta_fast": fast,
        "beta_slow": slow,
    }


def _mscale(factor: float, multiplier: float) -> float:
    return 0.1 * multiplier * math.log(factor) + 1.0
