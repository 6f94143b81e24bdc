"""The configuration of an EAGLE-3 head, whichever layout its files have.

Source: EAGLE-3 (arXiv 2503.01840) and its official implementation.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal

FcNorm = Literal["none", "whole", "each"]
NUM_TAPS = 3


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The hidden states that EAGLE-3 reads, as indices into transformers' ``hidden_states`` (0: the embeddings)."""
    return (2, num_layers // 2, num_layers - 3)


@dataclass(frozen=True)
class HeadVariant:
    """What published heads disagree about, often with their own configs.

    ``taps`` are indices into the target's ``hidden_states``, as transformers numbers them: 0 is the embeddings and
    ``i`` the output of layer ``i - 1``. ``fc_norm``: the RMSNorm before the fusing matmul is absent, over all taps
    together (``whole``), or over each tap. ``norm_before_residual``: the residual is the normalized feature.
    ``norm_output``: the hidden state that the next step reads is the normalized one. ``rope_theta``: the base of the
    rotation, or None for the config's.
    """

    taps: tuple[int, ...]
    fc_norm: FcNorm = "none"
    norm_before_residual: bool = False
    norm_output: bool = False
    rope_theta: float | None = None


@dataclass(frozen=True)
class HeadConfig:
    """A head: one transformer layer over token embeddings and fused features.

    ``layer`` is the transformers config of the layer (``LlamaConfig`` or ``Qwen3Config``): its sizes, rotation and
    RMSNorm epsilon. ``hidden_size`` of it is the size H of the features. ``target_hidden_size`` is the size of each
    tapped hidden state. ``draft_vocab_size`` is the number of logits; ``vocab_size`` that of the target.
    """

    layer: Any
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    variant: HeadVariant

    @property
    def hidden_size(self) -> int:
        """H, the columns of a feature."""
        return int(self.layer.hidden_size)

    @property
    def head_dim(self) -> int:
        """Columns of one attention head."""
        return int(getattr(self.layer, "head_dim", None) or self.hidden_size // self.layer.num_attention_heads)

    def with_variant(self, variant: HeadVariant) -> HeadConfig:
        """The same head read as another variant; ``layer`` has the variant's rotation."""
        layer = self.layer
        if variant.rope_theta is not None:
            layer = deepcopy(layer)
            layer.rope_parameters = {**layer.rope_parameters, "rope_theta": variant.rope_theta}
        return replace(self, variant=variant, layer=layer)
