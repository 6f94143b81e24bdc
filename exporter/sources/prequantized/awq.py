"""AWQ in the ``gemm`` layout of AutoAWQ, 4 bits.

    W[n, k] = scales[g, n] * (q[k, n] - zeros[g, n]),  g = k // group_size

``qweight`` [K, N / 8] and ``qzeros`` [G, N / 8] pack along N, eight to a word, in the order that GPU kernels expect;
``scales`` is [G, N].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from specrt.engines.errors import UnsupportedModelError
from specrt.exporter.sources.prequantized.decoding import Format
from specrt.exporter.sources.prequantized.unpacking import expect_shape, groups_of, unpack_words

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight columns each part of a word holds, the lowest part first


def awq_format(settings: Mapping[str, Any]) -> Format:
    """The format of ``settings``. Raises ``UnsupportedModelError`` for another layout than ``gemm`` in 4 bits."""
    layout = str(settings.get("checkpoint_format") or settings.get("format") or settings.get("version") or "gemm")
    bits = settings.get("bits", settings.get("w_bit", 4))
    if layout.lower() != "gemm" or bits != 4 or settings.get("backend") == "llm-awq":
        raise UnsupportedModelError(
            f"AWQ of version {layout!r} in {bits} bits is not read here, version 'gemm' in 4 bits is; export the model "
            "that it was made from"
        )
    return Format("AWQ", ("qweight", "qzeros", "scales"), (), lambda module, parts: dequantize_awq(parts))


def dequantize_awq(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[N, K] f32. Raises ``ValueError``."""
    scales = parts["scales"].float()
    num_groups, num_outputs = scales.shape
    levels = _in_order(unpack_words(parts["qweight"], 4, axis=1))  # [K, N]
    zeros = _in_order(unpack_words(parts["qzeros"], 4, axis=1))  # [G, N]
    expect_shape("qweight", levels, (len(levels), num_outputs))
    expect_shape("qzeros", zeros, (num_groups, num_outputs))
    group = groups_of(len(levels), num_groups)
    return ((levels - zeros[group]) * scales[group]).T


def _in_order(columns: torch.Tensor) -> torch.Tensor:
    """Undo ``ORDER`` within each eight columns."""
    inverse = torch.tensor(ORDER).argsort()
    return columns.view(len(columns), -1, len(ORDER))[:, :, inverse].flatten(1)
