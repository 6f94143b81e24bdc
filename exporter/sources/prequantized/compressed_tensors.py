"""compressed-tensors: integers packed into words, integers of 8 bits as they are, and 8-bit floats.

    W[n, k] = weight_scale[n, g] * (q[n, k] - weight_zero_point[n, g])

``pack-quantized``: ``weight_packed`` [N, ceil(K / m)] holds m = 32 // bits integers a word along K, each raised by half
its range; zero points are packed alike along N. ``weight_shape`` is [N, K]; g is ``weight_g_idx[k]`` where that is
stored, else k // group size. The other formats store q as ``weight``. There is one scale for all, or one per row,
group or block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specrt.engines.errors import SourceError, UnsupportedModelError
from specrt.exporter.sources.prequantized.decoding import WEIGHT, Format
from specrt.exporter.sources.prequantized.scaling import dequantize_scaled
from specrt.exporter.sources.prequantized.unpacking import expect_shape, groups_of, unpack_words

_PACKED = "pack-quantized"
_FORMATS = (_PACKED, "naive-quantized", "int-quantized", "float-quantized")
_MIXED = "mixed-precision"
_ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "k_scale", "v_scale")


def compressed_tensors_format(settings: Mapping[str, Any]) -> Format:
    """The format of ``settings``. Raises ``UnsupportedModelError`` for what is not read here, by its name."""
    groups = [group for group in (settings.get("config_groups") or {}).values() if isinstance(group, Mapping)]
    kinds = {str(group.get("format") or settings.get("format")) for group in groups} or {str(settings.get("format"))}
    kinds = {str(settings.get("format")) if kind == _MIXED else kind for kind in kinds}
    if unread := sorted(kinds - set(_FORMATS)):
        raise UnsupportedModelError(
            f"compressed-tensors of format {unread[0]!r} is not read here, {', '.join(_FORMATS)} are; export the model "
            "that it was made from"
        )
    sparsity = str((settings.get("sparsity_config") or {}).get("format") or "dense")
    if sparsity != "dense" or settings.get("transform_config"):
        what = f"sparsity {sparsity!r}" if sparsity != "dense" else "transform_config"
        raise UnsupportedModelError(f"compressed-tensors with {what} is not read here; export the uncompressed model")

    def decode(module: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        weights = _weights_of(module, groups)
        if "weight_packed" in parts:
            return dequantize_packed(parts, int(weights.get("num_bits", 0)))
        block = _block(weights)
        return dequantize_scaled(parts[WEIGHT], parts["weight_scale"], parts.get("weight_zero_point"), block)

    is_packed = kinds == {_PACKED}
    parts: tuple[str, ...] = (WEIGHT, "weight_scale")
    if is_packed:
        parts = ("weight_packed", "weight_scale", "weight_shape")
    elif _PACKED in kinds:
        parts = ("weight_scale",)  # some modules are packed, others are not
    optional = ("weight_zero_point", "weight_g_idx", "weight_packed", "weight_shape", WEIGHT)
    return Format("compressed-tensors", parts, tuple(p for p in optional if p not in parts), decode, _ACTIVATIONS)


def _weights_of(module: str, groups: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The weight settings of the group that names ``module``, or else of the group for its class."""
    named = [group for group in groups if any(_names(target, module) for target in group.get("targets") or ())]
    by_class = [group for group in groups if "Linear" in (group.get("targets") or ())]
    found = [group.get("weights") or {} for group in named or by_class or groups]
    if not found or any(weights != found[0] for weights in found):
        raise SourceError(f"{module}: {len(found)} of config_groups are for it, expected one; correct config.json")
    return found[0]


def _block(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """Sizes along N and K that share a scale, where ``weights`` give them: ``[128, 128]`` or ``128x128``."""
    structure = weights.get("block_structure")
    if structure:
        first, second = structure.split("x") if isinstance(structure, str) else structure
        return int(first), int(second)
    size = weights.get("group_size") or 0
    return (1, int(size)) if size > 0 else None


def _names(target: str, module: str) -> bool:
    """Whether a target, a name or ``re:`` and an expression, matches ``module``."""
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return module == target or module.endswith(f".{target}")


def dequantize_packed(parts: Mapping[str, torch.Tensor], bits: int) -> torch.Tensor:
    """[N, K] f32. Raises ``ValueError``."""
    if not 1 <= bits <= 8:
        raise ValueError(f"num_bits is {bits}, expected 1 to 8")
    words, scales = parts["weight_packed"], parts["weight_scale"].float()
    num_rows, num_columns = (int(size) for size in parts["weight_shape"])
    half, in_a_word = 1 << (bits - 1), 32 // bits
    expect_shape("weight_packed", words, (num_rows, -(-num_columns // in_a_word)))
    values = unpack_words(words, bits, axis=1)[:, :num_columns] - half  # [N, K]
    if scales.numel() == 1:
        scales = scales.reshape(1, 1).expand(num_rows, 1)
    expect_shape("weight_scale", scales, (num_rows, scales.shape[1]))
    group = groups_of(num_columns, scales.shape[1], _order(parts.get("weight_g_idx")))  # [K]
    zeros = parts.get("weight_zero_point")
    if zeros is not None:
        packed_rows = -(-num_rows // in_a_word)
        expect_shape("weight_zero_point", zeros, (packed_rows, scales.shape[1]))
        values = values - (unpack_words(zeros, bits, axis=0)[:num_rows] - half)[:, group]
    return values * scales[:, group]


def _order(indices: torch.Tensor | None) -> torch.Tensor | None:
    """None for indices that are not set, which are stored as -1."""
    return None if indices is None or bool((indices == -1).all()) else indices
