"""Tiny GGUF files, written as llama.cpp's converter writes them, to compare with the transformers model they state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGUFValueType, GGUFWriter, get_tensor_name_map
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.tiny import tiny_tokenizer

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
# GGUF architecture: transformers' model type, sizes of its own, and keys beyond those of every architecture.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {"head_dim": 32}, {"attention.key_length": 32, "attention.value_length": 32}),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5}, {"rope.dimension_count": 8}),
    "gemma2": (
        "gemma2",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "attn_logit_softcapping": 4.0,
         "final_logit_softcapping": 3.0, "tie_word_embeddings": True},
        {"attention.key_length": 32, "attention.value_length": 32, "attention.sliding_window": 8,
         "attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "tie_word_embeddings": True,
         "layer_types": ["sliding_attention", "full_attention"],
         "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
        {"attention.key_length": 32, "attention.value_length": 32, "attention.sliding_window": 8,
         "attention.sliding_window_pattern": 2, "rope.freq_base": 1e6, "rope.scaling.type": "linear",
         "rope.scaling.factor": 8.0},
    ),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.25}, {"rope.dimension_count": 4}),
    "starcoder2": ("starcoder2", {"rope_theta": 1e5, "norm_epsilon": 1e-3},
                   {"rope.freq_base": 1e5, "attention.layer_norm_epsilon": 1e-3}),
    "nemotron": ("nemotron", {"partial_rotary_factor": 0.5, "norm_eps": 1e-3},
                 {"rope.dimension_count": 8, "attention.layer_norm_epsilon": 1e-3}),
    "qwen2moe": (
        "qwen2_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "shared_expert_intermediate_size": 48},
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32,
         "expert_shared_feed_forward_length": 48},
    ),
    "qwen3moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32,
         "norm_topk_prob": True},
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "attention.key_length": 32,
         "attention.value_length": 32},
    ),
}  # fmt: skip
_LAYER_NORM = ("stablelm", "starcoder2", "nemotron")
_PLUS_ONE = ("gemma2", "gemma3", "nemotron")


def config_of(architecture: str, **overrides: Any) -> Any:
    """The transformers config that a file of ``write_gguf`` states."""
    model_type, sizes, _ = ARCHITECTURES[architecture]
    return CONFIG_MAPPING[model_type](**{**SIZES, **sizes, **overrides})


def model_of(config: Any, seed: int = 0) -> Any:
    """A random model of ``config`` in evaluation mode, in fp32. Norms and biases are not what they are born with."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith(".bias"):
            parameter.data += 0.2 * torch.rand_like(parameter)
    return model


def keys_of(architecture: str) -> dict[str, Any]:
    """The metadata of ``architecture`` without its prefix."""
    keys: dict[str, Any] = {
        "context_length": SIZES["max_position_embeddings"],
        "embedding_length": SIZES["hidden_size"],
        "block_count": SIZES["num_hidden_layers"],
        "feed_forward_length": SIZES["intermediate_size"],
        "attention.head_count": SIZES["num_attention_heads"],
        "attention.head_count_kv": SIZES["num_key_value_heads"],
        "rope.freq_base": 10000.0,
    }
    if architecture in _LAYER_NORM:
        keys["attention.layer_norm_epsilon"] = 1e-5
    else:
        keys["attention.layer_norm_rms_epsilon"] = 1e-5 if architecture in ("phi3",) else 1e-6
    return {**keys, **ARCHITECTURES[architecture][2]}


def tokenizer_keys() -> dict[str, Any]:
    """The metadata of the tiny tokenizer, whole."""
    tokenizer = tiny_tokenizer()
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = set(tokenizer.all_special_tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in data["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.chat_template": tokenizer.chat_template,
    }


def write_gguf(
    path: Path,
    model: Any,
    architecture: str = "llama",
    keys: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    others: dict[str, Any] | None = None,
) -> Path:
    """Write ``model`` to ``path``. ``keys`` (of the architecture), ``others`` (whole keys) and ``tensors`` are changed
    or added, and left out where None."""
    writer = GGUFWriter(path, architecture)
    own = {**keys_of(architecture), **(keys or {})}
    whole = {f"{architecture}.{key}": value for key, value in own.items()} | tokenizer_keys() | (others or {})
    for key, value in whole.items():
        if value is not None:
            _add(writer, key, value)
    for name, array in {**_tensors(model, architecture), **(tensors or {})}.items():
        if array is not None:
            writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
        return
    kinds = {bool: "BOOL", int: "UINT32" if value != -1 else "INT32", float: "FLOAT32", str: "STRING"}
    writer.add_key_value(key, value, GGUFValueType[kinds[type(value)]])


def _tensors(model: Any, architecture: str) -> dict[str, np.ndarray]:
    config = model.config
    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    found: dict[str, np.ndarray] = {}
    state = model.state_dict()
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith(".experts.gate_up_proj"):  # [experts, gate then up, hidden]
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                found[f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight"] = half.numpy()
            continue
        base, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            base, suffix = name, "weight"
        array = tensor.numpy()
        if architecture == "llama" and (".q_proj" in name or ".k_proj" in name):
            heads = config.num_attention_heads if ".q_proj" in name else config.num_key_value_heads
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        if architecture in _PLUS_ONE and name.endswith("norm.weight"):
            array = array + 1
        if name.endswith("shared_expert_gate.weight"):
            array = array[0]
        found[f"{names.get_name(base)}.{suffix}"] = array
    assert "None.weight" not in found
    return found
