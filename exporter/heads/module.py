"""An EAGLE-3 head in torch, for export, scoring and training. ``B`` texts, ``M`` pairs of a feature and a token.

Pair ``i`` is the target's feature at position ``i`` with the token at position ``i + 1``; it predicts the token at
``i + 2``. A step after the first reads the head's own hidden state in place of the target's feature.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from specrt.exporter.heads.config import NUM_TAPS, HeadConfig

# (query [B, N, M, D], key [B, Nkv, M, D], value [B, Nkv, M, D]) -> [B, M, N, D]; keys and values are the new ones.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_MLP: dict[str, type[nn.Module]] = {"llama": LlamaMLP, "qwen3": Qwen3MLP}


class HeadAttention(nn.Module):
    """Self-attention over rows of 2H columns: the normalized embedding and the normalized feature."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        layer, size, head_dim = config.layer, config.hidden_size, config.head_dim
        bias = bool(getattr(layer, "attention_bias", False))
        self.head_dim = head_dim
        self.q_proj = nn.Linear(2 * size, layer.num_attention_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(2 * size, layer.num_key_value_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(2 * size, layer.num_key_value_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(layer.num_attention_heads * head_dim, size, bias=bias)
        is_qwen = layer.model_type == "qwen3"
        self.q_norm, self.k_norm = (
            LlamaRMSNorm(head_dim, eps=layer.rms_norm_eps) if is_qwen else nn.Identity() for _ in range(2)
        )

    def forward(self, rows: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], attend: Attend) -> torch.Tensor:
        """[B, M, 2H] -> [B, M, H]"""
        split = (*rows.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(rows).view(split)).transpose(1, 2)
        key = self.k_norm(self.k_proj(rows).view(split)).transpose(1, 2)
        value = self.v_proj(rows).view(split).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *rotation)
        out: torch.Tensor = self.o_proj(attend(query, key, value).flatten(2))
        return out


class HeadLayer(nn.Module):
    """The transformer layer; ``hidden_norm`` normalizes features, ``input_layernorm`` embeddings."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.layer.rms_norm_eps
        self.self_attn = HeadAttention(config)
        self.mlp = _MLP[config.layer.model_type](config.layer)
        self.input_layernorm = LlamaRMSNorm(size, eps=eps)
        self.hidden_norm = LlamaRMSNorm(size, eps=eps)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps=eps)
        self._norm_before_residual = config.variant.norm_before_residual

    def forward(
        self,
        embeddings: torch.Tensor,
        features: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
    ) -> torch.Tensor:
        """[B, M, H] each -> [B, M, H]"""
        normalized = self.hidden_norm(features)
        residual = normalized if self._norm_before_residual else features
        rows = torch.cat((self.input_layernorm(embeddings), normalized), dim=-1)
        hidden = residual + self.self_attn(rows, rotation, attend)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Head(nn.Module):
    """An EAGLE-3 head. ``d2t`` [draft_vocab_size] i64 is an offset: logit ``i`` is of the target's id ``i + d2t[i]``.

    ``embed_tokens`` has a row for each of the target's ids.
    """

    d2t: torch.Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        size, tapped, eps = config.hidden_size, config.target_hidden_size, config.layer.rms_norm_eps
        norms = {"none": [], "whole": [NUM_TAPS * tapped], "each": [tapped] * NUM_TAPS}[config.variant.fc_norm]
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(columns, eps=eps) for columns in norms)
        self.fc = nn.Linear(NUM_TAPS * tapped, size, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.layer = HeadLayer(config)
        self.norm = LlamaRMSNorm(size, eps=eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config.layer)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """Features of the target's tapped hidden states, concatenated. [..., 3 Ht] -> [..., H]"""
        if self.config.variant.fc_norm == "whole":
            taps = self.fc_norm[0](taps)
        elif self.config.variant.fc_norm == "each":
            parts = taps.chunk(NUM_TAPS, dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: torch.Tensor = self.fc(taps)
        return fused

    def forward(
        self, ids: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step over pairs: ``ids`` [B, M] i64, ``features`` [B, M, H], ``positions`` [B, M] i64.

        Returns (what ``logits`` takes, what the next step reads in place of features), [B, M, H] each.
        """
        embeddings = self.embed_tokens(ids)
        rotation = self.rotary(embeddings, positions)
        hidden = self.layer(embeddings, features, rotation, attend)
        normalized = self.norm(hidden)
        return normalized, normalized if self.config.variant.norm_output else hidden

    def logits(self, normalized: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary. [..., H] -> [..., draft_vocab_size]"""
        out: torch.Tensor = self.lm_head(normalized)
        return out
