"""bitsandbytes: NF4 and FP4 by a table of 16 values and a scale per block, and 8-bit integers with a scale per row.

    4 bits:  W.flat[i] = quant_map[code[i]] * absmax[i // blocksize],  two codes a byte, the first one high
    nested:  absmax[j] = nested_quant_map[stored[j]] * nested_absmax[j // nested_blocksize] + nested_offset
    8 bits:  W[n, k] = weight[n, k] * SCB[n] / 127

``quant_state.bitsandbytes__nf4`` (or ``fp4``) holds JSON: shape, block sizes and the offset.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from specrt.engines.errors import UnsupportedModelError
from specrt.exporter.sources.prequantized.decoding import WEIGHT, Format

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")


def bitsandbytes_format(settings: Mapping[str, Any]) -> Format:
    """The format of ``settings``: 8 bits or 4. Raises ``UnsupportedModelError`` when they state neither."""
    if settings.get("load_in_8bit") or settings.get("_load_in_8bit"):
        return Format("bitsandbytes int8", (WEIGHT, "SCB"), ("weight_format",), lambda _, p: dequantize_int8(p))
    if settings.get("load_in_4bit") or settings.get("_load_in_4bit"):
        parts = (WEIGHT, "weight.absmax", "weight.quant_map")
        return Format("bitsandbytes 4-bit", parts, (*_STATES, *_NESTED), lambda _, p: dequantize_4_bits(p))
    raise UnsupportedModelError("bitsandbytes with neither load_in_4bit nor load_in_8bit is not read here")


def dequantize_int8(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[N, K] f32. Raises ``ValueError``."""
    if WEIGHT in parts and parts[WEIGHT].dtype != torch.int8:
        raise ValueError(f"weight is {parts[WEIGHT].dtype}, expected int8")
    if int(parts.get("weight_format", torch.zeros(1)).max()) != 0:
        raise ValueError("its weight_format is not 'row'")
    return parts[WEIGHT].float() * (parts["SCB"].float()[:, None] / 127)


def dequantize_4_bits(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[N, K] f32. Raises ``ValueError``."""
    state = _state(parts)
    shape = tuple(int(size) for size in state["shape"])
    packed = parts[WEIGHT].reshape(-1).contiguous().view(torch.uint8)
    codes = torch.stack([packed >> 4, packed & 15], dim=1).flatten()[: math.prod(shape)].long()
    if len(codes) != math.prod(shape):
        raise ValueError(f"weight holds {len(codes)} values, expected {math.prod(shape)}")
    values = parts["weight.quant_map"].float()[codes]
    return _scaled(values, _absmax(parts, state), int(state["blocksize"])).view(shape)


def _state(parts: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    stored = next((parts[name] for name in _STATES if name in parts), None)
    if stored is None:
        raise ValueError("weight.quant_state is missing")
    state = json.loads(bytes(stored.to(torch.uint8).tolist()).decode("utf-8"))
    if not isinstance(state, dict):
        raise ValueError("weight.quant_state is not a JSON object")
    return state


def _absmax(parts: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> torch.Tensor:
    """[blocks] f32; in a nested state, decoded from bytes."""
    absmax = parts["weight.absmax"].reshape(-1)
    if absmax.is_floating_point():
        return absmax.float()
    nested_map, nested_absmax = (parts[name].float() for name in (_NESTED[1], _NESTED[0]))
    values = _scaled(nested_map[absmax.long()], nested_absmax, int(state["nested_blocksize"]))
    return values + float(state["nested_offset"])


def _scaled(values: torch.Tensor, scales: torch.Tensor, block_size: int) -> torch.Tensor:
    """``values`` [n] times the scale of the block that each is in. The last block may be shorter."""
    if len(scales) != -(-len(values) // block_size):
        raise ValueError(f"{len(scales)} scales for {len(values)} values in blocks of {block_size}")
    return values * scales.repeat_interleave(block_size)[: len(values)]
