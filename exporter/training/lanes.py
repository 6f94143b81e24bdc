"""Many conversations in one pass of a torch model: lanes that share a ring of KV columns.

Each pass feeds one token of every lane and writes its keys and values to the same column, the number of the pass modulo
``window``. A lane attends to as many of the newest columns as its conversation has tokens, so that a conversation may
begin in any lane at any pass. Rotation is by each lane's own positions, so the order of the columns does not matter.
Keys and values of grouped heads are not copied for each query head, which would take most of the time.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from specrt.engines.errors import UnsupportedModelError

IMPLEMENTATION = "specrt-lanes"
_HARMLESS = frozenset({"position_ids", "use_cache", "output_attentions", "is_causal", "dropout", "cache_position"})
_HANDLED = frozenset({"scaling", "sliding_window"})


class RingCache(Cache):  # type: ignore[misc]
    """KV of ``num_lanes`` lanes in ``window`` columns.

    ``column`` is where the next pass writes. While ``captured`` is a list, a pass reads nothing and leaves its keys and
    values of each layer there (a prompt).
    """

    def __init__(self, num_layers: int, num_lanes: int, window: int) -> None:
        super().__init__(layers=[])
        self._num_layers, self._num_lanes, self.window = num_layers, num_lanes, window
        self._buffers: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * num_layers
        self.column = 0
        self.captured: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    def __len__(self) -> int:
        return self._num_layers

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Write [B, H, 1, D] to the column; return all columns [B, H, window, D]."""
        if self.captured is not None:
            self.captured.append((key_states, value_states))
            return key_states, value_states
        keys, values = self._of(layer_idx, key_states, value_states)
        keys[:, :, self.column], values[:, :, self.column] = key_states[:, :, 0], value_states[:, :, 0]
        return keys, values

    def place(self, lane: int, prompt: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Put captured keys and values of [1, H, P, D] into the columns before the next one, in one lane."""
        length = prompt[0][0].shape[2]
        columns = torch.arange(self.column - length, self.column, device=prompt[0][0].device) % self.window
        for layer, (key, value) in enumerate(prompt):
            keys, values = self._of(layer, key, value)
            keys[lane][:, columns], values[lane][:, columns] = key[0], value[0]

    def _of(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._buffers[layer]
        if found is None:
            shape = (self._num_lanes, key.shape[1], self.window)
            found = key.new_zeros(*shape, key.shape[-1]), value.new_zeros(*shape, value.shape[-1])
            self._buffers[layer] = found
        return found

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """[B, N, M, D] queries, [B, Nkv, W, D] keys and values, additive mask [B, 1, M, W] -> [B, M, N, D]"""
    window = options.get("sliding_window")
    given = [name for name, value in options.items() if name not in _HARMLESS | _HANDLED and value is not None]
    if given or (window is not None and window < key.shape[2]):
        raise UnsupportedModelError(
            f"{type(module).__name__}: got {given[0] if given else f'a window of {window}'} in its attention; torch "
            "writes text for models of plain softmax attention only; add --writer runtime"
        )
    lanes, heads, width, head_dim = query.shape
    kv_heads, columns = key.shape[1], key.shape[2]
    scale = options.get("scaling") or head_dim**-0.5
    grouped = (query * scale).reshape(lanes, kv_heads, heads // kv_heads * width, head_dim)
    scores = grouped @ key.transpose(2, 3)  # [B, Nkv, G M, W]
    scores = scores.view(lanes, heads, width, columns) + attention_mask
    weights = scores.softmax(-1).view(lanes, kv_heads, -1, columns)
    return (weights @ value).view(lanes, heads, width, -1).transpose(1, 2), None


def mask_of_lengths(lengths: torch.Tensor, column: int, window: int) -> torch.Tensor:
    """Additive mask [B, 1, 1, W] f32: each lane sees its ``lengths`` [B] newest columns, ``column`` included."""
    age = (column - torch.arange(window, device=lengths.device)) % window
    hidden = age[None, :] >= lengths[:, None]
    return torch.zeros(hidden.shape, device=lengths.device).masked_fill_(hidden, float("-inf"))[:, None, None]


def causal_mask(length: int, device: torch.device) -> torch.Tensor:
    """Additive mask [1, 1, M, M] f32."""
    return torch.full((length, length), float("-inf"), device=device).triu(1)[None, None]


def register() -> None:
    """Make ``attn_implementation="specrt-lanes"`` known to transformers. Idempotent."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
