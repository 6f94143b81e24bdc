"""Attention of training-time testing (EAGLE-3, arXiv 2503.01840): all steps of all chains in one forward pass.

Row ``i`` of step ``k`` is the pair ``i + k`` of the chain that begins after the target's feature ``i``. It sees the
pairs 0 to i, which have the target's features: the keys of step 0. Beyond them it sees the pairs of its own chain,
which are row ``i`` of the steps 1 to k.
"""

from __future__ import annotations

import torch


class ChainAttention:
    """Holds the keys and values of the steps so far; call it once for each step.

    ``mask`` [R, 1, L, L] f32 is the additive mask of step 0: causal, and within a conversation.
    """

    def __init__(self, mask: torch.Tensor) -> None:
        self._mask = mask
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[R, N, L, D] query, [R, Nkv, L, D] new keys and values -> [R, L, N, D]"""
        rows, heads, length, head_dim = query.shape
        kv_heads = key.shape[1]
        self._keys.append(key)
        self._values.append(value)
        grouped = (query * head_dim**-0.5).view(rows, kv_heads, heads // kv_heads, length, head_dim)
        first = grouped.flatten(2, 3) @ self._keys[0].transpose(2, 3)  # [R, Nkv, G L, L]
        scores = first.view(rows, kv_heads, -1, length, length) + self._mask[:, :, None]
        own = [(grouped * keys[:, :, None]).sum(-1, keepdim=True) for keys in self._keys[1:]]  # [R, Nkv, G, L, 1] each
        weights = torch.cat((scores, *own), dim=-1).softmax(-1)
        out = weights[..., :length].reshape(rows, kv_heads, -1, length) @ self._values[0]
        out = out.view(rows, kv_heads, -1, length, head_dim)
        for index, values in enumerate(self._values[1:]):
            place = length + index
            out = out + weights[..., place : place + 1] * values[:, :, None]
        return out.reshape(rows, heads, length, head_dim).transpose(1, 2)


def packed_mask(document: torch.Tensor) -> torch.Tensor:
    """Additive causal mask [R, 1, L, L] f32 within each conversation; ``document`` [R, L] numbers them, -1 is padding.

    Every position sees itself, so that rows of padding are finite.
    """
    length = document.shape[1]
    same = document[:, :, None] == document[:, None, :]
    seen = same & torch.ones(length, length, dtype=torch.bool, device=document.device).tril()
    return torch.zeros(seen.shape, device=document.device).masked_fill_(~seen, float("-inf"))[:, None]
