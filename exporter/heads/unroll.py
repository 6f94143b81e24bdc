"""A head's steps over a whole text at once, as in training-time testing (EAGLE-3, section 3.2)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from specrt.exporter.heads.module import Head


class _Keys:
    """Attention of step ``s`` from base ``i``: the rows of step 1 up to ``i``, and the chain's own rows after it."""

    def __init__(self, num_pairs: int) -> None:
        causal = torch.ones(num_pairs, num_pairs, dtype=torch.bool).tril()
        self._mask, self._own = causal, torch.eye(num_pairs, dtype=torch.bool)
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See ``module.Attend``."""
        if self._keys:
            self._mask = torch.cat((self._mask, self._own), dim=-1)  # [N, steps * N]
        self._keys.append(key)
        self._values.append(value)
        keys, values = torch.cat(self._keys, dim=2), torch.cat(self._values, dim=2)
        mask = self._mask.to(query.device)
        out = functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)


def unroll(head: Head, ids: torch.Tensor, features: torch.Tensor, num_steps: int) -> Iterator[torch.Tensor]:
    """What ``Head.logits`` takes, [B, N, H], of steps 1 to ``num_steps`` from each base ``i``.

    ``ids`` [B, N] and the target's ``features`` [B, N, H] are of one text per row. Step ``s`` from base ``i`` reads
    token ``i + s`` and the own hidden state of step ``s - 1``, and predicts token ``i + s + 1``. Its rows from
    ``N - s`` on have no token and mean nothing. Gradients flow through all steps.
    """
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    keys = _Keys(ids.shape[1])
    for step in range(1, num_steps + 1):
        tokens = functional.pad(ids[:, step:], (0, step))
        normalized, features = head(tokens, features, positions + step - 1, keys.attend)
        yield normalized
