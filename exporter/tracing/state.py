"""The state of one forward pass, shared by the attention functions and the emission of nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from specrt.engines.contract import ONNXRUNTIME_DIALECT

HEAD_DIM_MULTIPLE = 8  # ONNX Runtime's GroupQueryAttention and TensorRT's Attention refuse other head sizes


@dataclass(frozen=True)
class Mask:
    """A causal attention mask, limited to the last ``window`` positions if that is set."""

    window: int | None


@dataclass(frozen=True)
class AttentionSite:
    """One layer's attention, as observed. ``scale`` multiplies q.k; ``softcap`` 0 means none.

    Queries and keys have ``head_dim`` columns a head, values ``value_dim``.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float
    window: int | None
    value_dim: int

    @property
    def kv_head_dim(self) -> int:
        """Head size in the graph and in the KV cache: the larger of the two, padded to a size that kernels support."""
        return -(-max(self.head_dim, self.value_dim) // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE


@dataclass(frozen=True)
class ExpertsSite:
    """The experts of one layer, as observed.

    ``num_parameters`` counts all of them. ``is_sparse``: a pass reads only the experts that its tokens are routed to.
    """

    num_experts: int
    experts_per_token: int
    num_parameters: int
    is_sparse: bool


@dataclass
class Tracing:
    """State of one forward pass. In an export ``inputs`` are the graph's by name and ``present`` collects KV outputs.

    ``masks`` holds one mask per window, shared by its layers; ``slots`` where a pass writes, by the number of KV heads,
    for graphs in which ScatterND writes; ``experts`` has an entry for each layer with experts.
    """

    dialect: str = ONNXRUNTIME_DIALECT
    inputs: Mapping[str, torch.Tensor] | None = None
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)
    slots: dict[int, torch.Tensor] = field(default_factory=dict)
    updated: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    sites: dict[int, AttentionSite] = field(default_factory=dict)
    present: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    experts: list[ExpertsSite] = field(default_factory=list)


_active: list[Tracing] = []


@contextmanager
def tracing(state: Tracing) -> Iterator[Tracing]:
    """Make ``state`` the one that the attention functions use."""
    _active.append(state)
    try:
        yield state
    finally:
        _active.pop()


def current() -> Tracing:
    """The state of the innermost ``tracing`` block."""
    return _active[-1]
