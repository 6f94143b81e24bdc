"""The one attention of every exported model: transformers' attention and mask interfaces with our own functions.

A model's code calls the mask function once a forward pass for each kind of layer, ``cache.update`` and the attention
function once a layer. On the meta device (``observe``) they record what the model asks for; under
``torch.onnx.export`` they emit one ``com.microsoft::GroupQueryAttention`` a layer. No model's code is written twice,
and what GroupQueryAttention cannot express is refused by what the model *does*, not by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface

from specrt.engines.errors import UnsupportedModelError

IMPLEMENTATION = "specrt"
SUPPORTED = "specrt exports decoder-only models with softmax attention over a KV cache (full or sliding window)"

# What attention functions are also handed and that does not change the result of a cached, unpadded, inference pass.
_HARMLESS = frozenset({"position_ids", "use_cache", "output_attentions", "is_causal", "cache_position", "return_dict"})


def refuse(reason: str) -> NoReturn:
    """Raise ``UnsupportedModelError`` that says why and what is supported."""
    raise UnsupportedModelError(f"cannot export this model faithfully: {reason}; {SUPPORTED}")


@dataclass(frozen=True)
class Mask:
    """What a model's mask function amounts to: causal, within the last ``window`` positions if that is set."""

    window: int | None


@dataclass(frozen=True)
class AttentionSite:
    """One layer's attention, as observed. ``scale`` multiplies q.k; ``softcap`` 0 means none."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float
    window: int | None


@dataclass
class Tracing:
    """State of one forward pass. In an export the graph's inputs are set and ``present`` collects the KV outputs."""

    past: list[torch.Tensor] | None = None  # 2 a layer, key then value: [1, num_kv_heads, capacity, head_dim]
    seqlens_k: torch.Tensor | None = None  # [1] i32
    total: torch.Tensor | None = None  # [1] i32
    updated: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    sites: dict[int, AttentionSite] = field(default_factory=dict)
    present: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


_active: list[Tracing] = []


@contextmanager
def tracing(state: Tracing) -> Iterator[Tracing]:
    """Make ``state`` the one that the attention functions work on."""
    _active.append(state)
    try:
        yield state
    finally:
        _active.pop()


class ContractCache(Cache):
    """A ``Cache`` that keeps nothing: the attention node itself appends to the KV buffers."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[])
        self._num_layers = num_layers

    def __len__(self) -> int:
        return self._num_layers

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Note that layer ``layer_idx`` wrote [1, H, width, D] keys and values; hand them on unchanged."""
        updated = _active[-1].updated
        if layer_idx in updated:
            refuse(f"layer {layer_idx} writes its KV cache twice in a pass")
        updated[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


def mask_of(mask_function: Callable[..., Any], hint: int | None) -> Mask:
    """The ``Mask`` that equals ``mask_function(batch, head, query, key)``, found by evaluating it.

    ``hint`` is the window the caller names, or None. Raises ``UnsupportedModelError`` when the two are not the same.
    """
    window = hint
    edge = window or 8
    points = sorted({0, 1, edge - 1, edge, edge + 1, 2 * edge + 1})
    query = torch.tensor(points)[:, None]
    offsets = torch.tensor([-1, 0, 1, edge - 1, edge, edge + 1])
    key = query - offsets[None, :]  # [Q, K]: in the future, here, behind, at and beyond the edge
    query = query.expand_as(key)
    expected = (key <= query) & (key > query - window if window else torch.ones_like(key, dtype=torch.bool))
    zero = torch.zeros((), dtype=torch.long)
    found = torch.as_tensor(mask_function(zero, zero, query, key)).expand_as(key)
    inside = key >= 0
    if not torch.equal(found[inside], expected[inside]):
        refuse(f"its attention mask is neither causal nor a causal sliding window (hint: {hint})")
    return Mask(window)


def _mask(*, mask_function: Callable[..., Any], local_size: int | None = None, **_: Any) -> Mask:
    is_export = _active[-1].past is not None  # no values under torch.export, and observe() has checked them
    return Mask(local_size) if is_export else mask_of(mask_function, local_size)


def _site(module: Any, query: torch.Tensor, key: torch.Tensor, mask: Any, options: dict[str, Any]) -> AttentionSite:
    if not isinstance(mask, Mask):
        refuse(f"{type(module).__name__} does not use transformers' mask interface")
    head_dim = query.shape[-1]
    scale, softcap = options.pop("scaling", None), options.pop("softcap", None)
    window = options.pop("sliding_window", None)
    if window is not None and window != mask.window:
        refuse(f"{type(module).__name__} names a window of {window} and masks with {mask.window}")
    options.pop("dropout", None)
    unknown = sorted(
        name for name, value in options.items() if value is not None and value is not False and name not in _HARMLESS
    )
    if unknown:
        refuse(f"{type(module).__name__} passes {', '.join(unknown)} to its attention")
    scale = float(scale) if scale is not None else head_dim**-0.5
    return AttentionSite(query.shape[1], key.shape[1], head_dim, scale, float(softcap or 0.0), mask.window)


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """[1, H, M, D] queries over the cache and the [1, Hkv, M, D] new keys and values -> [1, M, H, D]."""
    state = _active[-1]
    layer = getattr(module, "layer_idx", None)
    written = state.updated.get(layer) if layer is not None else None
    if layer is None or written is None or written[0] is not key or written[1] is not value:
        refuse(f"{type(module).__name__} attends to keys and values that it did not write to its own cache")
    if key.shape != value.shape or key.shape[-1] != query.shape[-1]:
        refuse(
            f"{type(module).__name__} has keys of {key.shape[-1]} and values of {value.shape[-1]} (latent attention?)"
        )
    site = _site(module, query, key, attention_mask, dict(options))
    state.sites[layer] = site
    if state.past is None:
        return query.transpose(1, 2), None
    return _emit(state, layer, site, query, key, value), None


def _rows(states: torch.Tensor) -> torch.Tensor:
    """[1, H, M, D] -> [1, M, H * D]"""
    return states.transpose(1, 2).reshape(1, states.shape[2], states.shape[1] * states.shape[3])


def _emit(
    state: Tracing, layer: int, site: AttentionSite, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """One GroupQueryAttention node on a shared KV buffer."""
    assert state.past is not None and state.seqlens_k is not None and state.total is not None
    past_key, past_value = state.past[2 * layer], state.past[2 * layer + 1]
    query_rows = _rows(query)
    output, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        [query_rows, _rows(key), _rows(value), past_key, past_value, state.seqlens_k, state.total],
        {
            "num_heads": site.num_heads,
            "kv_num_heads": site.num_kv_heads,
            "scale": site.scale,
            "softcap": site.softcap,
            "local_window_size": site.window or -1,
        },
        dtypes=[query.dtype] * 3,
        shapes=[query_rows.shape, past_key.shape, past_value.shape],
        version=1,
    )
    state.present[layer] = (present_key, present_value)
    return output.reshape(1, query.shape[2], site.num_heads, site.head_dim)


def register() -> None:
    """Make ``attn_implementation="specrt"`` known to transformers. Idempotent."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
