"""An EAGLE-3 head in plain torch, read from its own files, without any code of ``specrt.exporter.heads``.

Written from the EAGLE-3 paper (arXiv 2503.01840) and the trainers' sources. It keeps no cache: each step computes all
pairs again. Pair ``i`` is the feature at position ``i`` with the token at ``i + 1``. ``Faults`` plants a known mistake.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional

Rounds = list[tuple[list[int], int]]


@dataclass(frozen=True)
class Faults:
    """Mistakes that a comparison must find."""

    tap_offset: int = 0
    token_shift: int = 1  # pair i has the token at i + token_shift
    d2t_is_table: bool = False
    keeps_own_rows: bool = False


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    """[M, N, D]: columns j and j + D/2 of row m are turned by m * theta^(-2j/D)."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None] / theta ** (torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Oracle:
    """The head in ``folder``. ``embedding`` [V, H] is the target's, ``num_layers`` the target's number of layers."""

    def __init__(self, folder: Path, num_layers: int, embedding: torch.Tensor, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        config = json.loads((folder / "config.json").read_text())
        safe = folder / "model.safetensors"
        files = load_file(safe) if safe.exists() else torch.load(folder / "pytorch_model.bin", weights_only=True)
        self.weights = {name.replace("midlayer.", "layers.0."): t for name, t in files.items()}
        nested = config.get("transformer_layer_config", config)
        self.heads, self.eps = nested["num_attention_heads"], nested.get("rms_norm_eps", 1e-6)
        self.theta = nested.get("rope_parameters", nested).get("rope_theta", 10000.0)
        self.config, self.embedding = config, self.weights.get("embed_tokens.weight", embedding).float()
        aux = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
        taps = [i + 1 for i in aux] if aux else config.get("eagle_aux_hidden_state_layer_ids")  # outputs of layers
        taps = taps or [2, num_layers // 2, num_layers - 3]
        self.taps = [tap + self.faults.tap_offset for tap in taps]
        num_drafted = len(self.weights["lm_head.weight"])
        offsets = self.weights.get("d2t", torch.zeros(num_drafted, dtype=torch.int64))
        self.ids = offsets if self.faults.d2t_is_table else torch.arange(num_drafted) + offsets

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self.weights[name + ".weight"].float(), self.eps)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        bias = self.weights.get(name + ".bias")
        return functional.linear(x, self.weights[name + ".weight"].float(), None if bias is None else bias.float())

    def features(self, hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        """[M, H] of the target's hidden states [M, Ht], numbered as transformers does."""
        parts = [hidden_states[tap] for tap in self.taps]
        if self.config.get("fc_norm"):
            parts = [self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
        fused = torch.cat(parts, -1)
        if self.config.get("norm_before_fc"):
            fused = self.norm(fused, "input_norm")
        return self.linear(fused, "fc")

    def step(self, tokens: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits over the target's ids [M, V], -inf where the head has none; next features [M, H]) of all pairs."""
        feature = self.norm(features, "layers.0.hidden_norm")
        residual = feature if self.config.get("norm_before_residual") else features
        rows = torch.cat((self.norm(self.embedding[tokens], "layers.0.input_layernorm"), feature), -1)
        hidden = residual + self.attention(rows)
        normed = self.norm(hidden, "layers.0.post_attention_layernorm")
        mlp = "layers.0.mlp."
        gate = functional.silu(self.linear(normed, mlp + "gate_proj"))
        hidden = hidden + self.linear(gate * self.linear(normed, mlp + "up_proj"), mlp + "down_proj")
        out = self.norm(hidden, "norm")
        logits = torch.full((len(tokens), len(self.embedding)), -torch.inf)
        logits[:, self.ids % len(self.embedding)] = self.linear(out, "lm_head")
        return logits, out if self.config.get("norm_output") else hidden

    def attention(self, rows: torch.Tensor) -> torch.Tensor:
        """Causal attention of [M, 2H] rows -> [M, H]."""
        name = "layers.0.self_attn."
        query = self.linear(rows, name + "q_proj").view(len(rows), self.heads, -1)
        key, value = (self.linear(rows, f"{name}{n}_proj").view(len(rows), -1, query.shape[-1]) for n in "kv")
        if name + "q_norm.weight" in self.weights:
            query, key = self.norm(query, name + "q_norm"), self.norm(key, name + "k_norm")
        query, key = rotated(query, self.theta), rotated(key, self.theta)
        key, value = (x.repeat_interleave(self.heads // x.shape[1], 1) for x in (key, value))
        scores = torch.einsum("ind,jnd->nij", query, key) / math.sqrt(query.shape[-1])
        future = torch.ones(len(rows), len(rows), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return self.linear(torch.einsum("nij,jnd->ind", weights, value).flatten(1), name + "o_proj")

    def chain(self, tokens: Sequence[int], features: torch.Tensor, k: int) -> tuple[list[int], torch.Tensor]:
        """(``k`` greedy ids after ``tokens`` [M + 1], all features) given those of the first M positions [M, H].

        Own hidden states are the features of the positions after them.
        """
        drafted: list[int] = []
        for _ in range(k):
            all_ids = torch.tensor([*tokens, *drafted])
            shift = self.faults.token_shift
            logits, hidden = self.step(all_ids[shift : shift + len(features)], features)
            drafted.append(int(logits[-1].argmax()))
            features = torch.cat((features, hidden[-1:]))
        return drafted, features


@torch.no_grad()
def reference_rounds(
    target_model: Any,
    head_folder: Path,
    prompt_ids: Sequence[int],
    k: int,
    num_tokens: int,
    faults: Faults | None = None,
) -> Rounds:
    """Greedy rounds with the head in ``head_folder``: (drafted ids, number accepted) of each, ``num_tokens`` in all.

    The prefill gives the first token, as in ``specrt.runtime.round``; it is no round. The last round drafts at most
    what is left. ``target_model`` is a causal LM of transformers, in evaluation mode.
    """
    config = target_model.config
    oracle = Oracle(head_folder, config.num_hidden_layers, target_model.get_input_embeddings().weight, faults)
    tokens, end, rounds = list(prompt_ids), len(prompt_ids) + num_tokens, Rounds()
    own = torch.empty(0)  # features of pairs that were built from own hidden states in earlier rounds
    tokens.append(int(target_model(torch.tensor([tokens])).logits[0, -1].argmax()))
    while len(tokens) < end:
        states = target_model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        features = oracle.features([state[0] for state in states])
        if oracle.faults.keeps_own_rows:
            features = torch.cat((own, features[len(own) :]))
        drafted, features = oracle.chain(tokens, features, min(k, end - len(tokens) - 1))
        choices = target_model(torch.tensor([tokens + drafted])).logits[0, len(tokens) - 1 :].argmax(-1).tolist()
        accepted = next((i for i, token in enumerate(drafted) if token != choices[i]), len(drafted))
        tokens += [*drafted[:accepted], choices[accepted]]
        own = features[: len(tokens) - 1]
        rounds.append((drafted, accepted))
    return rounds
