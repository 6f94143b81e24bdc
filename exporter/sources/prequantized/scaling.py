"""Weights of 8 bits that only need their scales: integers and 8-bit floats, per tensor, row, group or block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from specrt.engines.errors import UnsupportedModelError
from specrt.exporter.sources.prequantized.decoding import WEIGHT, Format

_FP8_WEIGHTS = ("float8_e4m3fn", "float8_e5m2")


def fp8_format(settings: Mapping[str, Any]) -> Format:
    """``quant_method`` fp8: ``weight`` times ``weight_scale_inv``, a scale per block (despite the name)."""
    kind = str(settings.get("fmt") or "e4m3")
    if kind not in ("e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2"):
        raise UnsupportedModelError(f"fp8 of fmt {kind!r} is not read here, e4m3 and e5m2 are")

    def decode(module: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        weight = parts[WEIGHT]
        if str(weight.dtype).removeprefix("torch.") not in _FP8_WEIGHTS:
            raise ValueError(f"weight is {weight.dtype}, expected an 8-bit float")
        scales = parts.get("weight_scale_inv", parts.get("weight_scale"))
        if scales is None:
            raise ValueError("weight_scale_inv is missing")
        return dequantize_scaled(weight, scales, block=(block[0], block[1]) if block else None)

    block = settings.get("weight_block_size")
    dropped = ("input_scale", "activation_scale", "k_scale", "v_scale")
    return Format("fp8", (WEIGHT,), ("weight_scale_inv", "weight_scale"), decode, dropped)


def dequantize_scaled(
    weight: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None = None,
    block: tuple[int, int] | None = None,
) -> torch.Tensor:
    """``(weight - zero_points) * scales``, [N, K] f32; scales of one value, [N], [N, G], or one a block of both axes.

    ``block`` is the size of blocks along N and K; None divides into equal ones. The last block of an axis may be
    shorter. Scales stored as bytes are powers of two (E8M0). Raises ``ValueError``.
    """
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    values = weight.float()  # [N, K]
    if zero_points is not None:
        values = values - _spread(zero_points.float(), values, block)
    return values * _spread(scales.float(), values, block)


def _spread(factors: torch.Tensor, weight: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    """``factors`` in a shape that broadcasts with ``weight`` [N, K]."""
    if factors.numel() == 1:
        return factors.reshape(1, 1)
    if factors.dim() == 1:
        factors = factors[:, None]
    for axis, size in enumerate(weight.shape):
        num_blocks = factors.shape[axis]
        if num_blocks in (1, size):
            continue
        length = block[axis] if block else size // num_blocks
        if -(-size // length) != num_blocks or (block is None and size % num_blocks):
            raise ValueError(f"{num_blocks} scales for {size} values in blocks of {length}")
        factors = factors.repeat_interleave(length, axis).narrow(axis, 0, size)
    return factors
