"""What a model asks of its attention and cache, found on the meta device before any weight is read."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from specrt.engines.spec import KVLayer
from specrt.exporter.attention import IMPLEMENTATION, ContractCache, refuse, register
from specrt.exporter.experts import IMPLEMENTATION as EXPERTS_IMPLEMENTATION
from specrt.exporter.experts import register_experts
from specrt.exporter.tracing import AttentionSite, ExpertsSite, Tracing, tracing


@dataclass(frozen=True)
class Observation:
    """Facts of an architecture: one attention site a layer, the padded vocabulary, and the bytes of an fp32 copy.

    ``experts`` are those of the layers that have some.
    """

    sites: tuple[AttentionSite, ...]
    vocab_size: int
    num_parameters: int
    max_position_embeddings: int
    experts: tuple[ExpertsSite, ...] = ()

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        return tuple(KVLayer(site.num_kv_heads, site.head_dim) for site in self.sites)


def observe(config: Any, trust_remote_code: bool = False) -> Observation:
    """Build the model of ``config`` without weights and watch one pass of it.

    Raises ``UnsupportedModelError`` when it cannot be exported faithfully.
    """
    _refuse_by_config(config, trust_remote_code)
    text = config.get_text_config()
    register()
    register_experts()
    try:
        config = copy.deepcopy(config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config,
                attn_implementation=IMPLEMENTATION,
                experts_implementation=EXPERTS_IMPLEMENTATION,
                trust_remote_code=trust_remote_code,
            ).eval()
        model.config.get_text_config().pad_token_id = None  # else models look for padding in ids that have no values
        with torch.no_grad():
            state, logits = _watch(model, text)
    except (ValueError, NotImplementedError, AttributeError, TypeError, KeyError, RuntimeError) as error:
        refuse(f"its code does not run on transformers' attention interface ({_first_line(error)})")
    num_layers = len(state.sites)
    if num_layers == 0:
        refuse("no layer calls transformers' attention interface")
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


def _refuse_by_config(config: Any, trust_remote_code: bool) -> None:
    """What a config alone tells, said in its own words."""
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        refuse(f"{config.model_type} is an encoder-decoder")
    if getattr(text, "kv_lora_rank", None):
        refuse(f"{config.model_type} uses latent attention (kv_lora_rank {text.kv_lora_rank})")
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        refuse(f"{config.model_type} has layers of type {', '.join(sorted(kinds))}")
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if not known and not (trust_remote_code and getattr(config, "auto_map", None)):
        refuse(f"transformers has no causal LM for model type {config.model_type!r}")
    if known and getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_is_stateful", False):
        refuse(f"{config.model_type} keeps a recurrent state")
    rope = getattr(text, "rope_parameters", None) or {}
    rows = [rope, *(row for row in rope.values() if isinstance(row, dict))]
    if any("dynamic" in str(row.get("rope_type", "")) for row in rows):
        refuse("dynamic rope scaling depends on the length reached and has no fixed graph")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
