"""GPTQ, as AutoGPTQ and GPTQModel store it.

    W[n, k] = scales[g, n] * (q[k, n] - zeros[g, n]),  g = g_idx[k]

``qweight`` [K * bits / 32, N] packs q along K, ``qzeros`` [G, N * bits / 32] packs zeros along N, ``scales`` is [G, N]
and ``g_idx`` [K]. Files of the first format hold zeros - 1, those of ``gptq_v2`` hold zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from specrt.engines.errors import UnsupportedModelError
from specrt.exporter.sources.prequantized.decoding import Format
from specrt.exporter.sources.prequantized.unpacking import expect_shape, groups_of, unpack_stream

_BITS = (2, 3, 4, 8)
_STORED_LESS_ONE = {"gptq": 1, "gptq_v2": 0}  # by checkpoint_format


def gptq_format(settings: Mapping[str, Any]) -> Format:
    """The format of ``settings``. Raises ``UnsupportedModelError`` for a variant with another layout."""
    kind = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
    if kind not in _STORED_LESS_ONE or settings.get("is_marlin_format"):
        raise UnsupportedModelError(
            f"GPTQ with checkpoint_format {kind!r} is not read here, gptq and gptq_v2 are; convert it, or export the "
            "model that it was made from"
        )
    if settings.get("adapter"):
        raise UnsupportedModelError("GPTQ with an adapter in its quantization_config is not read here")
    bits = None if settings.get("dynamic") else settings.get("bits")
    less_one = _STORED_LESS_ONE[kind]

    def decode(module: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return dequantize_gptq(parts, less_one, None if bits is None else int(bits))

    return Format("GPTQ", ("qweight", "qzeros", "scales"), ("g_idx",), decode)


def dequantize_gptq(parts: Mapping[str, torch.Tensor], less_one: int, bits: int | None) -> torch.Tensor:
    """[N, K] f32. ``bits`` None derives them from the shapes. Raises ``ValueError``."""
    qweight, qzeros, scales = parts["qweight"], parts["qzeros"], parts["scales"].float()
    num_groups, num_outputs = scales.shape
    found = qzeros.shape[1] * 32 // num_outputs
    if found not in _BITS or (bits is not None and bits != found):
        raise ValueError(f"its shapes say {found} bits, expected {bits if bits is not None else _BITS}")
    if qweight.dtype != torch.int32 or qzeros.dtype != torch.int32:
        raise ValueError(f"qweight is {qweight.dtype}, expected words of 32 bits")
    levels = unpack_stream(qweight, found, axis=0)  # [K, N]
    zeros = (unpack_stream(qzeros, found, axis=1) + less_one) & ((1 << found) - 1)  # [G, N]
    expect_shape("qweight", levels, (len(levels), num_outputs))
    expect_shape("qzeros", zeros, (num_groups, num_outputs))
    group = groups_of(len(levels), num_groups, parts.get("g_idx"))  # [K]
    return ((levels - zeros[group]) * scales[group]).T
