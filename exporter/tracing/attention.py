"""The one attention of every exported model: transformers' attention and mask interfaces with our own functions.

A model's code calls the mask function once per forward pass for each kind of layer, ``cache.update`` and the attention
function once per layer. On the meta device (``observe``) they record what the model requires; under
``torch.onnx.export`` they emit the attention of the spec's dialect (``specrt.exporter.tracing.emission``). No model's
code is reimplemented, and a model is refused for what it computes, not for its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface

from specrt.engines.errors import UnsupportedModelError
from specrt.exporter.tracing.emission import emit
from specrt.exporter.tracing.state import AttentionSite, Mask, Tracing, current

IMPLEMENTATION = "specrt"
SUPPORTED = "specrt exports decoder-only models with softmax attention over a KV cache (full or sliding window)"

# Arguments of attention functions that are not supported, and their usual names.
ATTENTION_OPTIONS = {
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
    "alibi": "an ALiBi position bias",
    "indices": "sparse attention to selected keys",
}
# Arguments that do not change the result of a cached, unpadded inference pass.
_HARMLESS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "is_causal", "cache_position", "return_dict", "logits_to_keep"}
)


def refuse(reason: str) -> NoReturn:
    """Raise ``UnsupportedModelError`` with the reason and with what is supported."""
    raise UnsupportedModelError(f"cannot export this model faithfully: {reason}; {SUPPORTED}")


class ContractCache(Cache):  # type: ignore[misc]
    """A ``Cache`` that stores nothing: the attention node itself appends to the KV buffers."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[])
        self._num_layers = num_layers

    def __len__(self) -> int:
        return self._num_layers

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Record that layer ``layer_idx`` wrote [1, H, width, D] keys and values; return them unchanged."""
        updated = current().updated
        if layer_idx in updated:
            refuse(f"layer {layer_idx} runs more than once in a pass and writes its KV cache each time")
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

    ``hint`` is the window that the caller states, or None. Raises ``UnsupportedModelError`` when the function is not
    the causal mask of this window.
    """
    window = hint
    edge = window or 8
    points = sorted({0, 1, edge - 1, edge, edge + 1, 2 * edge + 1})
    query = torch.tensor(points)[:, None]
    offsets = torch.tensor([-1, 0, 1, edge - 1, edge, edge + 1])
    key = query - offsets[None, :]  # [Q, K]: after, at and before the query, at and beyond the window's edge
    query = query.expand_as(key)
    expected = (key <= query) & (key > query - window if window else torch.ones_like(key, dtype=torch.bool))
    zero = torch.zeros((), dtype=torch.long)
    found = torch.as_tensor(mask_function(zero, zero, query, key)).expand_as(key)
    inside = key >= 0
    if bool(found[inside & (key > query)].any()):
        refuse("its attention is bidirectional: a token sees those that follow it, as in an encoder")
    if not torch.equal(found[inside], expected[inside]):
        refuse(f"its attention mask is neither causal nor a causal sliding window (hint: {hint})")
    return Mask(window)


def _mask(
    *, mask_function: Callable[..., Any], local_size: int | None = None, **_: Any
) -> Mask | UnsupportedModelError:
    """The mask, or the error to raise when a layer uses it: models also build masks that none of their layers uses."""
    if current().inputs is not None:
        return Mask(local_size)  # no values under torch.export, and observe() has checked them
    try:
        return mask_of(mask_function, local_size)
    except UnsupportedModelError as error:
        return error


def _site(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, options: dict[str, Any]
) -> AttentionSite:
    if isinstance(mask, UnsupportedModelError):
        raise mask
    if not isinstance(mask, Mask):
        refuse(f"{type(module).__name__} masks its attention in its own code, not through transformers' mask interface")
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
        named = ", ".join(
            f"{ATTENTION_OPTIONS[name]} ({name})" if name in ATTENTION_OPTIONS else name for name in unknown
        )
        refuse(f"{type(module).__name__} passes {named} to its attention")
    scale = float(scale) if scale is not None else head_dim**-0.5
    return AttentionSite(
        query.shape[1], key.shape[1], head_dim, scale, float(softcap or 0.0), mask.window, value.shape[-1]
    )


def _layer_of(module: Any, state: Tracing, key: torch.Tensor, value: torch.Tensor) -> int:
    """The index of the layer of ``module``, which must have written ``key`` and ``value`` to its own cache."""
    name, layer = type(module).__name__, getattr(module, "layer_idx", None)
    if not state.updated:
        refuse(f"{name} keeps no KV cache by transformers' cache interface")
    written = next((n for n, (k, v) in state.updated.items() if k is key and v is value), None)
    if written is None:
        refuse(f"{name} attends to other keys or values than it writes to its KV cache")
    if layer is not None and written != layer:
        refuse(f"layer {layer} runs more than once in a pass and keeps a KV cache for each time")
    return int(written)


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """[1, H, M, D] queries over the cache and new keys [1, Hkv, M, D] and values [1, Hkv, M, Dv] -> [1, M, H, Dv]."""
    state = current()
    layer = _layer_of(module, state, key, value)
    if key.shape[:-1] != value.shape[:-1] or key.shape[-1] != query.shape[-1]:
        refuse(
            f"{type(module).__name__} has queries of {query.shape[-1]} columns a head, {key.shape[1]} heads of keys of "
            f"{key.shape[-1]} and {value.shape[1]} of values of {value.shape[-1]}"
        )
    site = _site(module, query, key, value, attention_mask, dict(options))
    state.sites[layer] = site
    if state.inputs is None:
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1]), None
    return emit(state, layer, site, query, key, value), None


def register() -> None:
    """Make ``attn_implementation="specrt"`` known to transformers. Idempotent."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
