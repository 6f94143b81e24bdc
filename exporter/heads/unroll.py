"""A head's steps over whole texts at once, as in training-time testing (EAGLE-3, arXiv 2503.01840, section 3.2).

Row ``i`` of step ``k``, from 0, is the pair ``i + k`` of the chain that begins after the target's feature ``i``. It
sees the pairs 0 to i, which have the target's features: the keys of step 0. Beyond them it sees the pairs of its own
chain, which are row ``i`` of the steps 1 to k.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from specrt.exporter.heads.module import Head


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


def unroll(head: Head, ids: torch.Tensor, features: torch.Tensor, num_steps: int) -> Iterator[torch.Tensor]:
    """What ``Head.logits`` takes, [B, N, H], of steps 1 to ``num_steps`` from each base ``i``.

    ``ids`` [B, N] and the target's ``features`` [B, N, H] are of one text per row. Step ``s`` from base ``i`` reads
    token ``i + s`` and the own hidden state of step ``s - 1``, and predicts token ``i + s + 1``. Its rows from
    ``N - s`` on have no token and mean nothing. Gradients flow through all steps.
    """
    length = ids.shape[1]
    positions = torch.arange(length, device=ids.device).expand_as(ids)
    later = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
    attend = ChainAttention(features.new_zeros(1, 1, length, length).masked_fill_(later, float("-inf")))
    for step in range(1, num_steps + 1):
        tokens = functional.pad(ids[:, step:], (0, step))
        normalized, features = head(tokens, features, positions + step - 1, attend)
        yield normalized
