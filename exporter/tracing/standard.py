"""One layer's attention in operators of ONNX alone, for TensorRT.

``standard`` (opset 24): ``TensorScatter`` writes the new keys and values in place, ``Attention`` reads the whole buffer
under a boolean mask that the graph builds from the positions. TensorRT's parser would drop ``nonpad_kv_seqlen`` and
anchor ``is_causal`` at the upper left, so neither is used.

``standard-22`` (opset 20, the latest that TensorRT 10.3's parser names): ``ScatterND`` writes a second buffer, and
attention is in single operators.
"""

from __future__ import annotations

import torch

from specrt.engines.contract import POSITION_IDS, past_name
from specrt.exporter.tracing.state import AttentionSite, Tracing

STANDARD_OPSET, STANDARD_22_OPSET = 24, 20
# TensorRT-RTX builds its fused attention for heads of these sizes only.
_FUSED_HEAD_DIMS = range(16, 257)
States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query [1, H, M, D]; key and value [1, Hkv, M, D], padded


def past_of(state: Tracing, layer: int) -> list[torch.Tensor]:
    """The key and the value buffer, [1, num_kv_heads, capacity, head_dim] each."""
    assert state.inputs is not None
    return [state.inputs[past_name(part, layer)] for part in ("key", "value")]


def standard_attention(state: Tracing, layer: int, site: AttentionSite, states: States) -> torch.Tensor:
    """The dialect ``standard``. -> [1, M, H, D]"""
    assert state.inputs is not None
    query, *updates = states
    first = state.inputs[POSITION_IDS][:, 0]  # [1] i64: where the pass writes
    present = [
        torch.onnx.ops.symbolic(
            "TensorScatter",
            [past, update, first],
            {"axis": 2},
            dtype=past.dtype,
            shape=past.shape,
            version=STANDARD_OPSET,
        )
        for past, update in zip(past_of(state, layer), updates, strict=True)
    ]
    state.present[layer] = (present[0], present[1])
    mask = _mask_of(state, site, present[0].shape[2])
    if site.softcap or site.kv_head_dim not in _FUSED_HEAD_DIMS:
        return _in_single_operators(site, query, present[0], present[1], mask)
    output = torch.onnx.ops.symbolic(
        "Attention",
        [query, *present, mask],
        {"scale": site.scale, "is_causal": 0},
        dtype=query.dtype,
        shape=query.shape,
        version=STANDARD_OPSET,
    )
    return output.transpose(1, 2)


def standard_22_attention(state: Tracing, layer: int, site: AttentionSite, states: States) -> torch.Tensor:
    """The dialect ``standard-22``. -> [1, M, H, D]"""
    query, *updates = states
    slots = _slots_of(state, site.num_kv_heads)
    present = [
        torch.onnx.ops.symbolic(
            "ScatterND", [past, slots, update], dtype=past.dtype, shape=past.shape, version=STANDARD_22_OPSET
        )
        for past, update in zip(past_of(state, layer), updates, strict=True)
    ]
    state.present[layer] = (present[0], present[1])
    mask = _mask_of(state, site, present[0].shape[2])
    return _in_single_operators(site, query, present[0], present[1], mask)


def _in_single_operators(
    site: AttentionSite, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Attention where there is no operator, or it lacks a softcap or a head size. -> [1, M, H, D]

    Queries are transposed, not the cache, which TensorRT would copy once more to transpose it.
    """
    group = site.num_heads // site.num_kv_heads
    rows = query.reshape(1, site.num_kv_heads, -1, site.kv_head_dim)  # [1, Hkv, group * M, D]
    scores = (key @ rows.transpose(2, 3)).transpose(2, 3).float() * site.scale  # [1, Hkv, group * M, C]
    if site.softcap:
        scores = site.softcap * torch.tanh(scores / site.softcap)
    scores = scores.reshape(1, site.num_kv_heads, group, -1, key.shape[2])
    probs = torch.softmax(scores.masked_fill(~mask[:, None], float("-inf")), dim=-1).to(value.dtype)
    output = probs.reshape(1, site.num_kv_heads, -1, key.shape[2]) @ value
    return output.reshape(query.shape).transpose(1, 2)


def _mask_of(state: Tracing, site: AttentionSite, capacity: int) -> torch.Tensor:
    """The slots that each row sees: up to its position and inside its window. [1, 1, M, C] bool"""
    assert state.inputs is not None
    if site.window not in state.masks:
        slots = torch.arange(capacity)[None, None, None]  # [1, 1, 1, C]
        rows = state.inputs[POSITION_IDS][:, None, :, None]  # [1, 1, M, 1]
        seen = slots <= rows
        state.masks[site.window] = seen if site.window is None else seen & (slots > rows - site.window)
    return state.masks[site.window]


def _slots_of(state: Tracing, num_heads: int) -> torch.Tensor:
    """Where the pass writes, as ScatterND takes it: (batch, head, slot) of each head's new rows. [1, Hkv, M, 3] i64"""
    assert state.inputs is not None
    if num_heads not in state.slots:
        slots = state.inputs[POSITION_IDS][:, None, :, None]  # [1, 1, M, 1]
        heads = torch.arange(num_heads)[None, :, None, None]  # [1, Hkv, 1, 1]
        zeros = slots * 0
        state.slots[num_heads] = torch.cat([zeros + heads * 0, zeros + heads, slots + heads * 0], dim=-1)
    return state.slots[num_heads]
