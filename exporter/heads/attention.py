"""A head's attention in torch: what the exported graph is compared with."""

from __future__ import annotations

import torch


def attend_causally(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Each pair attends to itself and to those before it. Shapes as in ``module.Attend``."""
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)
