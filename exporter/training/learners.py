"""What is trained: an EAGLE-3 head, or a copy of the target with few layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from transformers import LlamaConfig

from specrt.engines.errors import UnsupportedModelError
from specrt.exporter.heads.config import HeadConfig, HeadVariant
from specrt.exporter.heads.module import Head
from specrt.exporter.heads.settings import rotation_for
from specrt.exporter.heads.unroll import ChainAttention
from specrt.exporter.training.batches import Batch, packed_mask
from specrt.exporter.training.loss import Agreement, Objective, Wanted, agree, draft_loss
from specrt.exporter.training.precision import matmul_dtype, training_matmuls
from specrt.exporter.training.target import TrainingTarget
from specrt.exporter.training.vocabulary import DraftVocabulary


class Learner(Protocol):
    """A draft in training. ``depth`` is the number of its steps; an ``Agreement`` is kept for each."""

    depth: int

    @property
    def module(self) -> nn.Module:
        """Its parameters that require gradients are trained and stored in checkpoints."""
        ...

    def loss(self, batch: Batch, objective: Objective, agreements: Sequence[Agreement]) -> torch.Tensor | None:
        """The weighted mean loss of the batch, or None if it has no position to learn from."""
        ...

    def measure(self, batch: Batch, agreements: Sequence[Agreement]) -> None:
        """Add the batch to ``agreements``, without gradients."""
        ...


def new_head(target: TrainingTarget, vocabulary: DraftVocabulary, variant: HeadVariant, seed: int) -> Head:
    """An untrained head of one llama layer of the target's sizes. Its embedding is the target's own tensor, frozen.

    lm_head begins as the target's. The fusing matmul begins as the identity of the last tap, which is closest to what
    lm_head reads.
    """
    text = target.model.config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layer = LlamaConfig(
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=text.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=target.vocab_size,
        max_position_embeddings=text.max_position_embeddings,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        rope_parameters=rotation_for(text),
        hidden_act="silu",
        tie_word_embeddings=False,
    )
    config = HeadConfig(layer, target.hidden_size, target.vocab_size, len(vocabulary.ids), variant)
    torch.manual_seed(seed)
    head = Head(config)
    size = target.hidden_size
    with torch.no_grad():
        for module in (head.layer.self_attn, head.layer.mlp):
            for weight in module.parameters():
                nn.init.normal_(weight, std=0.02) if weight.ndim == 2 else None
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, -size:] += torch.eye(size)
        head.lm_head.weight.copy_(target.lm_head[torch.from_numpy(vocabulary.ids).to(target.device)])
        head.d2t.copy_(torch.from_numpy(vocabulary.offsets))
    head.embed_tokens.weight = nn.Parameter(target.embedding, requires_grad=False)
    return head.to(target.device)


class HeadLearner:
    """A head, trained on chains of ``depth`` steps of its own, weighted by ``decay``."""

    def __init__(self, head: Head, target: TrainingTarget, ids: torch.Tensor, depth: int, decay: float) -> None:
        self.head, self.depth, self._decay = head, depth, decay
        self._ids = ids.to(target.device)
        self._target_rows = target.lm_head[self._ids].contiguous()  # [D, H]

    @property
    def module(self) -> Head:
        return self.head

    def loss(self, batch: Batch, objective: Objective, agreements: Sequence[Agreement]) -> torch.Tensor | None:
        losses: list[torch.Tensor] = []
        weights = [self._decay**step for step in range(self.depth)]
        for step, rows, normalized in self._steps(batch):
            wanted = batch.wanted(rows + 1 + step, self._target_rows)
            found = self._loss(normalized, wanted, objective, agreements[step])
            losses.append(weights[step] * found)
        return torch.stack(losses).sum() / sum(weights) if losses else None

    def _loss(
        self, normalized: torch.Tensor, wanted: Wanted, objective: Objective, agreement: Agreement
    ) -> torch.Tensor:
        dtype = matmul_dtype(normalized.device)
        return draft_loss(normalized, self.head.lm_head.weight, wanted, objective, agreement, self._ids, dtype)

    def measure(self, batch: Batch, agreements: Sequence[Agreement]) -> None:
        with torch.no_grad():
            for step, rows, normalized in self._steps(batch):
                wanted = batch.wanted(rows + 1 + step, self._target_rows)
                agree(normalized, self.head.lm_head.weight, wanted, agreements[step], self._ids)

    def _steps(self, batch: Batch) -> Any:
        """(step, flat indices [N] of its rows, what lm_head reads there [N, H]) for each step with rows."""
        attend = ChainAttention(packed_mask(batch.document))
        with training_matmuls(batch.taps.device):
            features = self.head.fuse(batch.taps)
        for step in range(self.depth):
            ids = batch.ids.roll(-1 - step, dims=1)  # pair i + step has the token at i + step + 1
            with training_matmuls(batch.taps.device):
                normalized, features = self.head(ids, features.float(), batch.positions + step, attend)
            rows = batch.chain_rows(1 + step)
            if len(rows):
                yield step, rows, normalized.float().flatten(0, 1)[rows]


class LayersLearner:
    """A copy of the target with few of its layers. It reads tokens alone; lm_head and embedding stay the target's."""

    depth = 1

    def __init__(self, model: Any, target: TrainingTarget) -> None:
        self.model = model
        self._ids = torch.arange(target.vocab_size, device=target.device)
        self._target_rows = target.lm_head
        model.requires_grad_(True)
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            for weight in module.parameters():
                weight.requires_grad_(False)

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self.model
        return module

    def loss(self, batch: Batch, objective: Objective, agreements: Sequence[Agreement]) -> torch.Tensor | None:
        rows, hidden = self._rows(batch)
        if not len(rows):
            return None
        wanted = batch.wanted(rows, self._target_rows)
        dtype = matmul_dtype(hidden.device)
        return draft_loss(hidden, self._target_rows, wanted, objective, agreements[0], self._ids, dtype)

    def measure(self, batch: Batch, agreements: Sequence[Agreement]) -> None:
        with torch.no_grad():
            rows, hidden = self._rows(batch)
            agree(hidden, self._target_rows, batch.wanted(rows, self._target_rows), agreements[0], self._ids)

    def _rows(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        with training_matmuls(batch.ids.device):
            hidden = self.model.base_model(
                input_ids=batch.ids,
                position_ids=batch.positions,
                attention_mask=packed_mask(batch.document),
                use_cache=False,
            ).last_hidden_state
        rows = batch.chain_rows(0)
        return rows, hidden.float().flatten(0, 1)[rows]


def check_head_fits(target: TrainingTarget) -> None:
    """Raise ``UnsupportedModelError`` for a target whose sizes a llama layer cannot have."""
    text = target.model.config.get_text_config()
    missing = [
        name
        for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
        if not isinstance(getattr(text, name, None), int)
    ]
    if missing:
        raise UnsupportedModelError(
            f"{target.name}: its config has no {missing[0]}, from which a head's layer takes its size; "
            "give --kind layers"
        )
