"""One layer's attention as ONNX nodes, one function per dialect.

``onnxruntime``: one ``com.microsoft::GroupQueryAttention``, which appends to the KV buffer and whose cost grows with
the length. Those for TensorRT are in ``specrt.exporter.tracing.standard``.

All need head sizes that are multiples of 8. Other sizes are padded with zeros, which add nothing to q.k; the padded
columns of the output are cut off. The scale is that of the unpadded size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from specrt.engines.contract import (
    ONNXRUNTIME_DIALECT,
    SEQLENS_K,
    STANDARD_22_DIALECT,
    STANDARD_DIALECT,
    TOTAL_SEQUENCE_LENGTH,
)
from specrt.exporter.tracing.standard import States, past_of, standard_22_attention, standard_attention
from specrt.exporter.tracing.state import AttentionSite, Tracing


def emit(
    state: Tracing, layer: int, site: AttentionSite, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """The attention of ``layer`` in the dialect of ``state``, which also collects its KV outputs. -> [1, M, H, Dv]"""
    query, key, value = (_padded(states, site.kv_head_dim) for states in (query, key, value))
    output = _EMITTERS[state.dialect](state, layer, site, (query, key, value))  # [1, M, H, D]
    output = output if site.value_dim == site.kv_head_dim else output[..., : site.value_dim]
    return output.contiguous()  # as transformers' own attention functions return it: some models view it


def _padded(states: torch.Tensor, size: int) -> torch.Tensor:
    """[1, H, M, D] -> [1, H, M, size], with zeros after each head's columns."""
    missing = size - states.shape[-1]
    return torch.nn.functional.pad(states, (0, missing)) if missing else states


def _rows(states: torch.Tensor) -> torch.Tensor:
    """[1, H, M, D] -> [1, M, H * D]"""
    return states.transpose(1, 2).reshape(1, states.shape[2], states.shape[1] * states.shape[3])


def _group_query_attention(state: Tracing, layer: int, site: AttentionSite, states: States) -> torch.Tensor:
    assert state.inputs is not None
    past_key, past_value = past_of(state, layer)
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


_EMITTERS: dict[str, Callable[[Tracing, int, AttentionSite, States], torch.Tensor]] = {
    ONNXRUNTIME_DIALECT: _group_query_attention,
    STANDARD_DIALECT: standard_attention,
    STANDARD_22_DIALECT: standard_22_attention,
}
