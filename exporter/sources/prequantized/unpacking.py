"""Small integers out of 32-bit words, and the groups of columns that share a scale."""

from __future__ import annotations

import torch

_WORD = 32


def unpack_stream(words: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """Integers of ``bits`` from words [R, C] i32 along ``axis``: [R, C * 32 / bits] i32 for axis 1.

    The bits are one stream, the lowest first. 32 integers take ``bits`` words; with 3 bits some cross from one word
    into the next.
    """
    rows = (words if axis == 1 else words.T).to(torch.int64) & 0xFFFFFFFF  # [R, C]
    if rows.shape[1] * _WORD % bits or (_WORD % bits and rows.shape[1] % bits):
        raise ValueError(f"{rows.shape[1]} words do not hold whole integers of {bits} bits")
    starts = torch.arange(rows.shape[1] * _WORD // bits) * bits
    first, shift = starts // _WORD, starts % _WORD
    following = (first + 1).clamp_max(rows.shape[1] - 1)
    wide = rows[:, first] | (rows[:, following] << _WORD)  # the two words that an integer can touch
    values = ((wide >> shift) & ((1 << bits) - 1)).to(torch.int32)
    return values if axis == 1 else values.T


def unpack_words(words: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """As ``unpack_stream``, but no integer crosses into another word: each word holds ``32 // bits``."""
    rows = (words if axis == 1 else words.T).to(torch.int64) & 0xFFFFFFFF  # [R, C]
    shifts = torch.arange(_WORD // bits) * bits
    values = ((rows[:, :, None] >> shifts) & ((1 << bits) - 1)).flatten(1).to(torch.int32)
    return values if axis == 1 else values.T


def groups_of(num_columns: int, num_groups: int, order: torch.Tensor | None = None) -> torch.Tensor:
    """The group of each column, [K] i64: ``order`` where the file gives one, else groups of equal size in a row."""
    if order is None:
        if num_groups < 1 or num_columns % num_groups:
            raise ValueError(f"{num_columns} columns do not divide into {num_groups} groups")
        return torch.arange(num_columns) // (num_columns // num_groups)
    if order.shape != (num_columns,) or int(order.min()) < 0 or int(order.max()) >= num_groups:
        raise ValueError(f"its group indices do not fit {num_columns} columns in {num_groups} groups")
    return order.to(torch.int64)


def expect_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise ``ValueError`` when ``tensor`` has another shape."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {list(tensor.shape)}, expected {list(shape)}")
