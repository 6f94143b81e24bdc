"""Tiny random models, one row for each architecture that the contract is tested on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

VOCAB_SIZE = 211  # with 64 columns: large enough that the exporter does not fold a shared table
WINDOW = 16  # sliding windows are shrunk so that 100 past tokens are far beyond the edge
ORIGINAL_LENGTH = 64  # scaled ropes are tested beyond it

_BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _rope(kind: str, **options: Any) -> dict[str, Any]:
    return {
        "rope_type": kind,
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL_LENGTH,
        **options,
    }


ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-head-of-8": ("LlamaConfig", {"head_dim": 8}),  # too narrow for rotation inside the attention node
    "llama-head-of-100": ("LlamaConfig", {"head_dim": 100}),  # no kernel takes it: padded to 104
    "llama-head-of-6": ("LlamaConfig", {"head_dim": 6, "num_key_value_heads": 1}),
    "gpt2-head-of-25": ("GPT2Config", {"hidden_size": 100}),
    "llama-head-of-320": ("LlamaConfig", {"head_dim": 320, "num_key_value_heads": 1}),  # beyond TensorRT's attention
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-rope-llama3": (
        "LlamaConfig",
        {"rope_parameters": _rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0)},
    ),
    "llama-rope-yarn": ("LlamaConfig", {"rope_parameters": _rope("yarn")}),
    "llama-rope-linear": ("LlamaConfig", {"rope_parameters": _rope("linear")}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW, "head_dim": 16}),
    "phi3": ("Phi3Config", {}),
    "phi3-partial-rotary": ("Phi3Config", {"partial_rotary_factor": 0.5}),
    "phi3-longrope": (
        "Phi3Config",
        {
            "original_max_position_embeddings": ORIGINAL_LENGTH,
            "rope_parameters": _rope("longrope", short_factor=[1.0] * 8, long_factor=[1.0 + i for i in range(8)]),
        },
    ),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": WINDOW, "attn_logit_softcapping": 5.0}),
    "gemma3": (  # in the two layers, one of each kind
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "granite": (
        "GraniteConfig",
        {
            "logits_scaling": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.7,
            "embedding_multiplier": 2.0,
        },
    ),
    "olmo2": ("Olmo2Config", {}),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "cohere": ("CohereConfig", {}),
    "glm4": ("Glm4Config", {"head_dim": 32}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "gemma2-head-of-12": (  # windows, soft caps and a scale of its own, on padded heads
        "Gemma2Config",
        {"head_dim": 12, "sliding_window": WINDOW, "attn_logit_softcapping": 5.0},
    ),
    "lfm2-attention-only": ("Lfm2Config", {"layer_types": ["full_attention"] * 2}),
}
# Five that differ in what an export can get wrong: rotation inside the attention node, scaled; padded heads, windows of
# both kinds, soft caps, an own scale and a tied head; one packed projection and factors by length; learned positions,
# biases and transposed weights; and experts behind the most involved router. The others are slow.
REPRESENTATIVE = ("llama-rope-llama3", "gemma2-head-of-12", "phi3-longrope", "gpt2", "glm4_moe")


_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_GROUPED = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
# Mixtures of experts, by what their routers and layers differ in.
EXPERTS_ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "qwen3_moe": (  # weights that are not normalized, and a layer without experts
        "Qwen3MoeConfig",
        {**_EXPERTS, "head_dim": 16, "norm_topk_prob": False, "mlp_only_layers": [0]},
    ),
    "glm4_moe": (  # sigmoids with a correction bias, groups, a scaling, shared experts, dense first layers
        "Glm4MoeConfig",
        {**_GROUPED, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "n_shared_experts": 1, "head_dim": 16},
    ),
    "qwen2_moe": ("Qwen2MoeConfig", {**_EXPERTS, "shared_expert_intermediate_size": 40}),  # sliding_window becomes 0
    "olmoe": ("OlmoeConfig", {**_EXPERTS}),
    "phimoe": ("PhimoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 2},
    ),
    "granitemoe": ("GraniteMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 3.0}),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 40},
    ),
    "flex_olmo": ("FlexOlmoConfig", {**_EXPERTS}),
    "dots1": ("Dots1Config", {**_GROUPED, "first_k_dense_replace": 1, "n_shared_experts": 1, "norm_topk_prob": True}),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", {"num_experts": 8, "moe_topk": 3, "head_dim": 16}),
    "aria_text": ("AriaTextConfig", {"moe_num_experts": 8, "moe_topk": 3, "moe_num_shared_experts": 1}),
    "afmoe": (
        "AfmoeConfig",
        {**_EXPERTS, "num_shared_experts": 1, "num_dense_layers": 1, "sliding_window": WINDOW, "head_dim": 16},
    ),
    "cohere2_moe": ("Cohere2MoeConfig", {**_EXPERTS, "head_dim": 16, "sliding_window": WINDOW}),
    "exaone_moe": ("ExaoneMoeConfig", {**_EXPERTS, "sliding_window": WINDOW}),
    "hy_v3": ("HYV3Config", {**_EXPERTS, "head_dim": 16}),
    "laguna": ("LagunaConfig", {**_EXPERTS, "shared_expert_intermediate_size": 40, "head_dim": 16}),
    "mellum": ("MellumConfig", {**_EXPERTS, "head_dim": 16}),
    "minimax_m2": ("MiniMaxM2Config", {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16}),
    "solar_open": ("SolarOpenConfig", {**_GROUPED, "head_dim": 16}),
    "sarvam_moe": ("SarvamMoEConfig", {**_EXPERTS, "head_dim": 16}),
    "kolibri1": ("Kolibri1Config", {**_EXPERTS, "head_dim": 16}),
}
ROWS |= EXPERTS_ROWS


def each_row() -> list[Any]:
    """The rows of ``ROWS`` as parameters of a test; those that are not representative are slow."""
    return [pytest.param(name, marks=() if name in REPRESENTATIVE else pytest.mark.slow, id=name) for name in ROWS]


def tiny_config(name: str, **overrides: Any) -> Any:
    """The config of a row of ``ROWS``."""
    kind, options = ROWS[name]
    return getattr(hf, kind)(**{**_BASE, **options, **overrides})


def tiny_model(name: str, **overrides: Any) -> Any:
    """A random model in evaluation mode. Every parameter is moved off its initial value, norms and biases included."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(tiny_config(name, **overrides), dtype=torch.float32).eval()
    with torch.no_grad():
        biases = [buffer for name, buffer in model.named_buffers() if "bias" in name]  # of routers
        for parameter in (*model.parameters(), *biases):
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
