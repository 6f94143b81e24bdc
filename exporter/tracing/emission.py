"""One layer's attention as ONNX nodes, one function per dialect.

``onnxruntime``: one ``com.microsoft::GroupQueryAttention``, which appends to the KV buffer and whose cost grows with
the length. ``standard`` (opset 24): ``TensorScatter`` writes the new keys and values, ``Attention`` reads the whole
buffer under a boolean mask that the graph builds from the positions. TensorRT's parser would drop ``nonpad_kv_seqlen``
and anchor ``is_causal`` at the upper left, so neither is used.

Both need head sizes that are multiples of 8. Other sizes are padded with zeros, which add nothing to q.k; the padded
columns of the output are cut off. The scale is that of the unpadded size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from specrt.engines.contract import (
    ONNXRUNTIME_DIALECT,
    POSITION_IDS,
    SEQLENS_K,
    STANDARD_DIALECT,
    TOTAL_SEQUENCE_LENGTH,
    past_name,
)
from specrt.exporter.tracing.state import AttentionSite, Tracing

STANDARD_OPSET = 24
# TensorRT-RTX builds its fused attention for heads of these sizes only.
_FUSED_HEAD_DIMS = range(16, 257)
_States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query [1, H, M, D]; key and value [1, Hkv, M, D], padded


def emit(
    state: Tracing, layer: int, site: AttentionSite, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """The attention of ``layer`` in the dialect of ``state``, which also collects its KV outputs. -> [1, M, H, Dv]"""
    query, key, value = (_padded(states, site.kv_head_dim) for states in (query, key, value))
    output = _EMITTERS[state.dialect](state, layer, site, (query, key, value))  # [1, M, H, D]
    return output if site.value_dim == site.kv_head_dim else output[..., : site.value_dim]


def _padded(states: torch.Tensor, size: int) -> torch.Tensor:
    """[1, H, M, D] -> [1, H, M, size], with zeros after each head's columns."""
    missing = size - states.shape[-1]
    return torch.nn.functional.pad(states, (0, missing)) if missing else states


def _past(state: Tracing, layer: int) -> list[torch.Tensor]:
    """The key and the value buffer, [1, num_kv_heads, capacity, head_dim] each."""
    assert state.inputs is not None
    return [state.inputs[past_name(part, layer)] for part in ("key", "value")]


def _rows(states: torch.Tensor) -> torch.Tensor:
    """[1, H, M, D] -> [1, M, H * D]"""
    return states.transpose(1, 2).reshape(1, states.shape[2], states.shape[1] * states.shape[3])


def _group_query_attention(state: Tracing, layer: int, site: AttentionSite, states: _States) -> torch.Tensor:
    assert state.inputs is not None
    past_key, past_value = _past(state, layer)
    query_rows, key_rows, value_rows = map(_rows, states)
    lengths = [state.inputs[SEQLENS_K], state.inputs[TOTAL_SEQUENCE_LENGTH]]
    output, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        [query_rows, key_rows, value_rows, past_key, past_value, *lengths],
        {
            "num_heads": site.num_heads,
            "kv_num_heads": site.num_kv_heads,
            "scale": site.scale,
            "softcap": site.softcap,
            "local_window_size": site.window or -1,
        },
        dtypes=[query_rows.dtype] * 3,
        shapes=[query_rows.shape, past_key.shape, past_value.shape],
        version=1,
    )
    state.present[layer] = (present_key, present_value)
    return output.reshape(1, query_rows.shape[1], site.num_heads, site.kv_head_dim)


def _standard_attention(state: Tracing, layer: int, site: AttentionSite, states: _States) -> torch.Tensor:
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
        for past, update in zip(_past(state, layer), updates, strict=True)
    ]
    if site.window not in state.masks:
        state.masks[site.window] = _mask(state.inputs[POSITION_IDS], present[0].shape[2], site.window)
    state.present[layer] = (present[0], present[1])
    mask = state.masks[site.window]
    if site.softcap or site.kv_head_dim not in _FUSED_HEAD_DIMS:
        return _in_single_operators(site, query, present[0], present[1], mask).transpose(1, 2)
    output = torch.onnx.ops.symbolic(
        "Attention",
        [query, *present, mask],
        {"scale": site.scale, "is_causal": 0},
        dtype=query.dtype,
        shape=query.shape,
        version=STANDARD_OPSET,
    )
    return output.transpose(1, 2)


def _in_single_operators(
    site: AttentionSite, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Attention for what TensorRT's ``Attention`` lacks: a softcap, and some head sizes. -> [1, H, M, D]

    Queries are transposed, not the cache, which TensorRT would copy once more to transpose it.
    """
    group = site.num_heads // site.num_kv_heads
    rows = query.reshape(1, site.num_kv_heads, -1, site.kv_head_dim)  # [1, Hkv, group * M, D]
    scores = (key @ rows.transpose(2, 3)).transpose(2, 3).float() * site.scale  # [1, Hkv, group * M, C]
    if site.softcap:
        scores = site.softcap * torch.tanh(scores / site.softcap)
    scores = scores.reshape(1, site.num_kv_heads, group, -1, key.shape[2])
    probs = torch.softmax(scores.masked_fill(~mask[:, None], float("-inf")), dim=-1).to(value.dtype)
    return (probs.reshape(1, site.num_kv_heads, -1, key.shape[2]) @ value).reshape(query.shape)


def _mask(positions: torch.Tensor, capacity: int, window: int | None) -> torch.Tensor:
    """The slots that each row sees: up to its position and inside its window. [1, M] -> [1, 1, M, C] bool"""
    slots = torch.arange(capacity)[None, None, None]  # [1, 1, 1, C]
    rows = positions[:, None, :, None]  # [1, 1, M, 1]
    seen = slots <= rows
    return seen if window is None else seen & (slots > rows - window)


_EMITTERS: dict[str, Callable[[Tracing, int, AttentionSite, _States], torch.Tensor]] = {
    ONNXRUNTIME_DIALECT: _group_query_attention,
    STANDARD_DIALECT: _standard_attention,
}
