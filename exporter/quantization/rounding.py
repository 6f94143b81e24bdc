"""Weights in 4 bits: the choice of scale and lowest value of each block.

A weight is ``scale * q + lowest`` with ``q`` in 0 .. 15. The kernels take a zero point ``z`` in 0 .. 15 instead of the
lowest value, ``scale * (q - z)``. The difference, ``offset = lowest + z * scale``, is one number per block. Columns
that are appended to the weight add it exactly, as ``offset * sum of the block's inputs``.

Weights from a 4-bit file are on such a grid already. With the offset they are reproduced exactly; without it, each
block is off by up to half a step. Grids with an integer zero point (GPTQ, AWQ, compressed-tensors; GGUF's Q4_0, but not
Q4_1 and Q4_K) have offsets of zero. Blocks that are on no grid get the scale and zero point with the least error, and
no offset, which would hardly help.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from specrt.engines.interface import Array

LEVELS = 15  # steps from the lowest to the highest value of 4 bits
_ON_GRID = 1e-3  # of a block's range: smaller differences are float rounding, not another level
_SAMPLE_ROWS = 32
_CLIPPED = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # shares of a block's range that are tried
_CHUNK = 1 << 24  # weights at a time


@dataclass(frozen=True)
class Rounded:
    """A weight [N, K] in blocks [N, B] of 4 bits. ``offsets`` is None where they are not worth their bytes."""

    levels: Array  # [N, B, size] u8, 0 .. 15
    scales: Array  # [N, B] f32
    zero_points: Array  # [N, B] u8, 0 .. 15
    offsets: Array | None  # [N, B] f32


def share_on_grid(weight: Array, size: int, through_zero: bool = False) -> float:
    """The share of blocks of ``weight`` [N, K] f32 that are on a 4-bit grid, estimated from rows spread over it.

    ``through_zero`` counts only those whose offset is zero.
    """
    rows, columns = weight.shape
    if columns % size:
        return 0.0
    sample = np.ascontiguousarray(weight[:: max(1, rows // _SAMPLE_ROWS)], np.float32)
    blocks = torch.from_numpy(sample.reshape(-1, size))
    *_, misses = _grid_of(_and_zero(blocks) if through_zero else blocks)
    return float((misses <= _ON_GRID).float().mean())


def round_blocks(weight: Array, size: int, with_offsets: bool, through_zero: bool = False) -> Rounded:
    """Round ``weight`` [N, K] f32 in blocks of ``size``; the last one is padded with zeros.

    ``with_offsets``: blocks that are on a grid are rounded to it, all others to the values with the least error.
    ``through_zero``: without offsets, blocks on a grid whose offset is zero are rounded to it.
    """
    round_one = _round_through_zero if through_zero else _round_on_grid if with_offsets else _round_searched
    rows, columns = weight.shape
    num_blocks = -(-columns // size)
    per_chunk = max(1, _CHUNK // (num_blocks * size))
    parts = []
    for start in range(0, rows, per_chunk):
        chunk = torch.from_numpy(np.ascontiguousarray(weight[start : start + per_chunk], np.float32))
        padded = torch.nn.functional.pad(chunk, (0, num_blocks * size - columns)).view(-1, size)
        parts.append(round_one(padded))
    levels, scales, zeros, offsets = (torch.cat(part).numpy() for part in zip(*parts, strict=True))
    by_row = (rows, num_blocks)
    return Rounded(
        levels.reshape(*by_row, size),
        scales.reshape(by_row),
        zeros.reshape(by_row),
        offsets.reshape(by_row) if with_offsets else None,
    )


def _grid_of(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(scales, lowest values, largest miss as a share of the range), each [B], of the grid that fits [B, size] best.

    Fewer levels are tried only for blocks that do not fit more; blocks that fit no grid keep the finest one.
    """
    lowest = blocks.amin(-1)
    span = blocks.amax(-1) - lowest
    steps = torch.full_like(span, LEVELS)
    misses = torch.full_like(span, torch.inf)
    open_ = torch.arange(len(blocks))
    for count in range(LEVELS, 0, -1):
        # [B', size]: where each weight is between the lowest and the highest, in units of the range
        share = (blocks[open_] - lowest[open_, None]) / span[open_, None].clamp_min(torch.finfo(torch.float32).tiny)
        miss = (share - (share * count).round() / count).abs().amax(-1)
        better = miss < misses[open_] / 2
        misses[open_[better]], steps[open_[better]] = miss[better], count
        open_ = open_[misses[open_] > _ON_GRID]
        if len(open_) == 0:
            break
    scales = span / steps
    return torch.where(scales > 0, scales, torch.ones_like(scales)), lowest, misses


def _and_zero(blocks: torch.Tensor) -> torch.Tensor:
    """[B, size] -> [B, size + 1], with a zero, so that a grid of these has an integer zero point."""
    return torch.nn.functional.pad(blocks, (0, 1))


def _round_through_zero(blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scales, lowest, misses = _grid_of(_and_zero(blocks))
    return _on_grid_or_searched(blocks, scales, lowest, misses)


def _round_on_grid(blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return _on_grid_or_searched(blocks, *_grid_of(blocks))


def _on_grid_or_searched(
    blocks: torch.Tensor, scales: torch.Tensor, lowest: torch.Tensor, misses: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    zeros = (-lowest / scales).round().clamp(0, LEVELS)
    levels = ((blocks - lowest[:, None]) / scales[:, None]).round().clamp(0, LEVELS)
    rounded = (levels.to(torch.uint8), scales, zeros.to(torch.uint8), lowest + zeros * scales)
    others = misses > _ON_GRID
    if others.any():
        for on_grid, searched in zip(rounded, _round_searched(blocks[others]), strict=True):
            on_grid[others] = searched
    return rounded


def _round_searched(blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Least squares over ``_CLIPPED``; zero stays exact."""
    lowest, highest = blocks.amin(-1).clamp_max(0), blocks.amax(-1).clamp_min(0)
    least = torch.full_like(lowest, torch.inf)
    best_scales, best_zeros = torch.ones_like(lowest), torch.zeros_like(lowest)
    for share in _CLIPPED:
        scales = (highest - lowest) * (share / LEVELS)
        scales = torch.where(scales > 0, scales, torch.ones_like(scales))
        zeros = (-lowest * share / scales).round().clamp(0, LEVELS)
        error = (_levels(blocks, scales, zeros) - zeros[:, None]).mul_(scales[:, None]).sub_(blocks).square_().sum(-1)
        better = error < least
        least = torch.where(better, error, least)
        best_scales, best_zeros = torch.where(better, scales, best_scales), torch.where(better, zeros, best_zeros)
    levels = _levels(blocks, best_scales, best_zeros)
    return levels.to(torch.uint8), best_scales, best_zeros.to(torch.uint8), torch.zeros_like(lowest)


def _levels(blocks: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    return (blocks / scales[:, None]).add_(zeros[:, None]).round_().clamp_(0, LEVELS)


def symmetric_scales(blocks: Array, largest: int) -> Array:
    """Scales [...] f32 of ``blocks`` [..., size] f32 in integers of -``largest`` - 1 .. ``largest``: least squares.

    The weight of the largest magnitude may use the extra level of the negative side.
    """
    values = torch.from_numpy(np.ascontiguousarray(blocks, np.float32))
    at = values.abs().argmax(-1, keepdim=True)
    signed = values.gather(-1, at).squeeze(-1)
    least = torch.full_like(signed, torch.inf)
    best = torch.ones_like(signed)
    candidates = [signed.abs() * (share / largest) for share in _CLIPPED]
    candidates += [-signed * (share / (largest + 1)) for share in _CLIPPED[:3]]  # the largest becomes -largest - 1
    for scales in candidates:
        scales = torch.where(scales != 0, scales, torch.ones_like(scales))
        levels = (values / scales[..., None]).round_().clamp_(-largest - 1, largest)
        error = levels.mul_(scales[..., None]).sub_(values).square_().sum(-1)
        better = error < least
        least, best = torch.where(better, error, least), torch.where(better, scales, best)
    result: Array = best.numpy()
    return result
