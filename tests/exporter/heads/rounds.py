"""Greedy rounds with the exporter's own head module and a KV cache, to be compared with the oracle's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from specrt.exporter.heads.module import Head


class CachedHead:
    """A head with a KV cache: pairs built from the target's features are kept over rounds, the chain's own are not."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def chain(self, tokens: Sequence[int], features: torch.Tensor, k: int) -> list[int]:
        """``k`` greedy ids after ``tokens`` [M + 1], given the target's features [M, H] of the first M."""
        start, drafted = len(self._keys), []
        own, ids = features[start:], list(tokens[start + 1 :])
        for _ in range(k):
            normalized, own = self._step(ids, own)
            best = int(self.head.logits(normalized).argmax())
            drafted.append(best + int(self.head.d2t[best]))
            ids = drafted[-1:]
        del self._keys[len(features) :], self._values[len(features) :]
        return drafted

    def _step(self, ids: list[int], features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        start = len(self._keys)
        positions = torch.arange(start, start + len(ids))[None]
        normalized, after = self.head(torch.tensor([ids]), features[None], positions, self._attend)
        return normalized[0, -1], after[0, -1:]

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        start, width = len(self._keys), query.shape[2]
        self._keys += key[0].unbind(1)
        self._values += value[0].unbind(1)
        keys, values = torch.stack(self._keys, 1)[None], torch.stack(self._values, 1)[None]
        mask = torch.arange(start + width) <= torch.arange(start, start + width)[:, None]
        out = functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)


@torch.no_grad()
def module_rounds(
    target: Any, head: Head, prompt: Sequence[int], k: int, num_tokens: int
) -> list[tuple[list[int], int]]:
    """As ``oracle.reference_rounds``."""
    drafter, taps = CachedHead(head), head.config.variant.taps
    tokens, end, rounds = list(prompt), len(prompt) + num_tokens, []
    tokens.append(int(target(torch.tensor([tokens])).logits[0, -1].argmax()))
    while len(tokens) < end:
        states = target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        features = head.fuse(torch.cat([states[tap][0] for tap in taps], -1))
        drafted = drafter.chain(tokens, features, min(k, end - len(tokens) - 1))
        choices = target(torch.tensor([tokens + drafted])).logits[0, len(tokens) - 1 :].argmax(-1).tolist()
        accepted = next((i for i, token in enumerate(drafted) if token != choices[i]), len(drafted))
        tokens += [*drafted[:accepted], choices[accepted]]
        rounds.append((drafted, accepted))
    return rounds
