"""The one attention of every exported model: transformers' attention and mask interfaces with our own functions.

A model's code calls the mask function once a forward pass for each kind of layer, ``cache.update`` and the attention
function once a layer. On the meta device (``observe``) they record what the model asks for; under
``torch.onnx.export`` they emit the attention of the spec's dialect (``specrt.exporter.emission``). No model's code is
written twice, and what a dialect cannot express is refused by what the model *does*, not by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface

from specrt.engines.errors import UnsupportedModelError
from specrt.exporter.emission import emit
from specrt.exporter.tracing import AttentionSite, Mask, current

IMPLEMENTATION = "specrt"
SUPPORTED = "specrt exports decoder-only models with softmax attention over a KV cache (full or sliding window)"

# What attention functions are also handed and that does not change the result of a cached, unpadded, inference pass.
_HARMLESS = frozenset({"position_ids", "use_cache", "output_attentions", "is_causal", "cache_position", "return_dict"})


def refuse(reason: str) -> NoReturn:
    """Raise ``UnsupportedModelError`` that says why and what is supported."""
    raise UnsupportedModelError(f"cannot export this model faithfully: {reason}; {SUPPORTED}")


class ContractCache(Cache):
    """A ``Cache`` that keeps nothing: the attention node itself appends to the KV buffers."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[])
        self._num_layers = num_layers

    def __len__(self) -> int:
        return self._num_layers

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Note that layer ``layer_idx`` wrote [1, H, width, D] keys and values; hand them on unchanged."""
        updated = current().updated
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


def _mask(
    *, mask_function: Callable[..., Any], local_size: int | None = None, **_: Any
) -> Mask | UnsupportedModelError:
    """The mask, or the reason why there is none: models make masks of kinds that none of their layers uses."""
    if current().inputs is not None:
        return Mask(local_size)  # no values under torch.export, and observe() has checked them
    try:
        return mask_of(mask_function, local_size)
    except UnsupportedModelError as error:
        return error


def _site(module: Any, query: torch.Tensor, key: torch.Tensor, mask: Any, options: dict[str, Any]) -> AttentionSite:
    if isinstance(mask, UnsupportedModelError):
        raise mask
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
    state = current()
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
    if state.inputs is None:
        return query.transpose(1, 2), None
    return emit(state, layer, site, query, key, value), None


def register() -> None:
    """Make ``attn_implementation="specrt"`` known to transformers. Idempotent."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
