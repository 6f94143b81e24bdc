"""What a model requires of its attention and cache, found on the meta device before any weight is read."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specrt.engines.contract import KVLayer
from specrt.engines.errors import UnsupportedModelError
from specrt.exporter.tracing.attention import IMPLEMENTATION, ContractCache, refuse, register
from specrt.exporter.tracing.experts import IMPLEMENTATION as EXPERTS_IMPLEMENTATION
from specrt.exporter.tracing.experts import register_experts
from specrt.exporter.tracing.refusals import reason_of, refuse_by_config
from specrt.exporter.tracing.state import AttentionSite, ExpertsSite, Tracing, tracing

_READS_IDS = "warn_if_padding_and_no_attention_mask"  # a warning that needs the values of ids
_OWN_POSITIONS = "create_position_ids_from_input_ids"  # of embeddings: position = padding id + 1 + index


@dataclass(frozen=True)
class Observation:
    """Facts of an architecture: one attention site a layer, the padded vocabulary, and the bytes of an fp32 copy.

    ``experts`` has an entry for each layer with experts.
    """

    sites: tuple[AttentionSite, ...]
    vocab_size: int
    num_parameters: int
    max_position_embeddings: int
    experts: tuple[ExpertsSite, ...] = ()

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        return tuple(KVLayer(site.num_kv_heads, site.kv_head_dim) for site in self.sites)


def observe(config: Any, trust_remote_code: bool = False) -> Observation:
    """Build the model of ``config`` without weights and observe one pass.

    Raises ``UnsupportedModelError`` when it cannot be exported faithfully.
    """
    text = refuse_by_config(config, trust_remote_code)
    register()
    register_experts()
    try:
        model = _without_weights(config, trust_remote_code)
        with torch.no_grad():
            state, logits = _watch(model, text)
    except UnsupportedModelError:
        raise
    except Exception as error:  # a model's own code can raise anything
        refuse(reason_of(error, config))
    num_layers = len(state.sites)
    if num_layers == 0:
        refuse(
            f"{type(model).__name__} computes attention in its own code, not through transformers' attention interface"
        )
    if sorted(state.sites) != list(range(num_layers)) or sorted(state.updated) != list(range(num_layers)):
        refuse("its layers do not each have a KV cache of their own (shared or recurrent state)")
    if num_layers != text.num_hidden_layers:
        refuse(f"{text.num_hidden_layers - num_layers} of its layers keep another state than a KV cache")
    return Observation(
        tuple(state.sites[layer] for layer in range(num_layers)),
        int(logits.shape[-1]),
        sum(parameter.numel() for parameter in model.parameters()),
        int(getattr(text, "max_position_embeddings", 0) or 0),
        tuple(state.experts),
    )


def _without_weights(config: Any, trust_remote_code: bool) -> Any:
    """The model of ``config`` on the meta device, with our attention."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            attn_implementation=IMPLEMENTATION,
            experts_implementation=EXPERTS_IMPLEMENTATION,
            trust_remote_code=trust_remote_code,
        ).eval()
    for module in model.modules():
        if hasattr(module, _READS_IDS):
            setattr(module, _READS_IDS, _ignore)
        if hasattr(module, _OWN_POSITIONS):
            refuse(f"{type(module).__name__} numbers its positions from the padding id on, and not from 0")
    return model


def _ignore(*_: Any, **__: Any) -> None: ...


def _watch(model: Any, text_config: Any) -> tuple[Tracing, torch.Tensor]:
    ids = torch.zeros(1, 3, dtype=torch.long, device="meta")
    with tracing(Tracing()) as state:
        output = model(
            input_ids=ids,
            position_ids=torch.arange(3, device="meta")[None],
            cache=ContractCache(text_config.num_hidden_layers),
            use_cache=True,
            logits_to_keep=torch.tensor([2], device="meta"),
        )
    if tuple(output.logits.shape[:2]) != (1, 1):
        refuse("it does not honour logits_to_keep")
    return state, output.logits
