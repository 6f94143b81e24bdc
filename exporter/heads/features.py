"""What a target's graph writes as its features, and the torch model's own, with which the graph is compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from specrt.engines.interface import Array
from specrt.engines.progress import Progress
from specrt.exporter.heads.config import HeadVariant
from specrt.exporter.heads.files import build_head
from specrt.exporter.heads.fitting import fit_variant
from specrt.exporter.heads.module import Head
from specrt.exporter.heads.plan import HeadPlan
from specrt.exporter.heads.taps import tapped_states
from specrt.exporter.heads.texts import opening_ids, write_texts
from specrt.exporter.parity.precision import cast_weights
from specrt.exporter.planning import ModelPlan
from specrt.exporter.tracing.longrope import fixed_longrope
from specrt.exporter.tracing.trace import torch_dtype


@dataclass(frozen=True)
class FittedHead:
    """A head as the variant that is exported, in the spec's dtype.

    ``features`` [N, H] f32 are those of the torch target over the reference ids. ``has_target_table``: its embedding
    is the target's.
    """

    plan: HeadPlan
    module: Head
    features: Array
    has_target_table: bool


@dataclass(frozen=True)
class Features:
    """The hidden states ``taps`` of a target, concatenated, and fused where a ``head`` reads them.

    ``num_columns`` are those before fusing; ``expected`` [N, H] f32 are the torch model's over the reference ids.
    """

    taps: tuple[int, ...] = ()
    num_columns: int | None = None
    expected: Array | None = None
    head: FittedHead | None = None


NO_FEATURES = Features()


def features_of(model: Any, plan: ModelPlan, ids: Array, head: HeadPlan | None, progress: Progress) -> Features:
    """The features that the graph of ``plan`` writes. ``ids`` [N] are the reference ids, ``model`` the torch target.

    Raises ``PairError`` for a head that predicts the target's text no better than chance.
    """
    if plan.spec.feature_size is None:
        return NO_FEATURES
    if head is None:
        states = _states(model, plan, ids, plan.taps)
        return Features(plan.taps, states.shape[1], states.float().numpy())
    variant, embedding = _variant(head, model, plan, progress), model.get_input_embeddings().weight
    module = build_head(head.loaded.config.with_variant(variant), head.loaded.tensors, embedding)
    dtype = torch_dtype(head.spec.dtype)
    cast_weights(module, dtype)
    has_target_table = torch.equal(module.embed_tokens.weight, embedding)
    states = _states(model, plan, ids, variant.taps)
    with torch.no_grad():
        expected = module.fuse(states.to(dtype)).float().numpy()
    return Features(variant.taps, states.shape[1], expected, FittedHead(head, module, expected, has_target_table))


def _variant(head: HeadPlan, model: Any, plan: ModelPlan, progress: Progress) -> HeadVariant:
    """The variant that predicts the target's text best; the one that the options name, if they do."""
    embedding = model.get_input_embeddings().weight
    progress.step("draft: text of the target")
    with fixed_longrope(model, plan.spec.max_seq_len):
        context = plan.observation.max_position_embeddings or None
        texts = write_texts(model, opening_ids(plan.source.tokenizer), context=context)
    progress.step("draft: scoring its variants")
    fit = fit_variant(head.loaded, texts, embedding, len(plan.observation.kv_layers), head.is_named)
    for line in (*fit.lines(), *fit.warnings):
        progress.note(line)
    return fit.variant


def _states(model: Any, plan: ModelPlan, ids: Array, taps: tuple[int, ...]) -> torch.Tensor:
    with fixed_longrope(model, plan.spec.max_seq_len):
        return tapped_states(model, ids, taps)
