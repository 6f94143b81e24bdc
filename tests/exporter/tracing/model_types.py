"""A tiny config of every model type that transformers has a causal LM for, made by rules and a few rows."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
import transformers as hf
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_NUM_LAYERS = 2

# Sizes by the names that configs give them; a config takes those that it knows.
_SIZES: dict[str, Any] = {
    **{"vocab_size": 211, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"max_position_embeddings": 256, "sliding_window": 16, "rotary_dim": 8},
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "decoder_layers", "num_decoder_layers"), _NUM_LAYERS),
    **dict.fromkeys(("d_model", "n_embd", "emb_dim", "word_embed_proj_dim", "embedding_size"), 64),
    **dict.fromkeys(("ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_inner"), 96),
    **dict.fromkeys(("n_head", "n_heads", "decoder_attention_heads", "encoder_attention_heads"), 4),
    **{"n_positions": 256, "max_seq_len": 256, "n_inner": None, "encoder_layers": 2, "num_encoder_layers": 2},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(
        ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "d_head"), 16
    ),
    **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 211, "global_head_dim": 32},
    **{"attention_types": [[["global", "local"], 1]], "is_decoder": True},
}
_ALWAYS = {"vocab_size", "hidden_size", "num_hidden_layers", "pad_token_id", "bos_token_id", "eos_token_id"}

_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
# What the rules do not give: sizes that a type ties together, and what its defaults leave out.
_OVERRIDES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE)},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "hidden_size": 64},
    },
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma4_assistant": {
        "text_config": {
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "layer_types": ["sliding_attention", "full_attention"],
        }
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2, "n_groups": 1},
    "reformer": {"axial_pos_embds_dim": (32, 32), "attn_layers": ["local", "lsh"]},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
# Types whose own defaults are taken: they do not take these sizes, and are refused by their config alone.
_DEFAULTS = {"prophetnet", "zamba", "zamba2", "dots3_note"}


def tiny_config_of(model_type: str) -> Any:
    """A config of ``model_type`` with two layers, or one layer for each kind that its default config has."""
    kind: Any = hf.CONFIG_MAPPING[model_type]
    if model_type in _DEFAULTS:
        return kind()
    if "text_config" in (getattr(kind, "sub_configs", None) or {}):
        own = _OVERRIDES.get(model_type, {}).get("text_config", {})
        text = hf.Gemma4TextConfig if own else type(kind().get_text_config())
        options: dict[str, Any] = {"text_config": {**_sizes_of(text, model_type), **own}}
        return kind(**options)
    return kind(**_sizes_of(kind, model_type))


def _sizes_of(kind: Any, model_type: str) -> dict[str, Any]:
    aliases = getattr(kind, "attribute_map", None) or {}
    names = _parameters(kind) | set(aliases)
    sizes = {name: value for name, value in _SIZES.items() if name in names | _ALWAYS}
    for name, target in aliases.items():  # two names of one size
        if target in sizes and target != name:
            sizes.pop(name, None)
    overrides = {k: v for k, v in _OVERRIDES.get(model_type, {}).items() if k != "text_config"}
    return {**sizes, **_layer_types(kind), **overrides}


def _layer_types(kind: Any) -> dict[str, Any]:
    """One layer for each kind of layers that the default config has, where those are more than one."""
    kinds = list(dict.fromkeys(getattr(kind(), "layer_types", None) or ()))
    if len(kinds) < 2 or "layer_types" not in _parameters(kind):
        return {}
    return {"layer_types": kinds, "num_hidden_layers": len(kinds)}


def _parameters(kind: Any) -> set[str]:
    names = set(inspect.signature(kind.__init__).parameters)
    if dataclasses.is_dataclass(kind):
        names |= {field.name for field in dataclasses.fields(kind)}
    return names


def random_model(config: Any, seed: int = 0) -> Any:
    """A random model of ``config`` whose greedy text varies: layers outweigh the embedding tables."""
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    head = model.get_output_embeddings()
    tables = {id(model.get_input_embeddings().weight), id(head.weight) if head is not None else 0}
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if id(parameter) in tables:
                parameter.copy_(noise * 0.02)
            elif parameter.dim() > 1:
                parameter.copy_(noise * 0.3)
            else:
                parameter.add_(noise * 0.1)
    return model
