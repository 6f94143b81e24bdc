"""GGUF files of tiny transformers models, with the changes that llama.cpp's converter makes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGUFWriter, get_tensor_name_map

from specrt.engines.interface import Array


def _interleave(values: Array, heads: int) -> Array:
    """llama.cpp's order of the rows of queries and keys."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _as_llama_cpp_writes(name: str, values: Array, architecture: str, config: Any) -> Array:
    if architecture == "llama" and (match := re.search(r"\.attn_([qk])\.", name)):
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
        return _interleave(values, heads[match.group(1)])
    if architecture in ("gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
        return values + 1
    if architecture == "gpt2" and re.search(r"(attn_qkv|attn_output|ffn_up|ffn_down)\.weight$", name):
        transposed: Array = values.T
        return transposed
    if name.endswith("ffn_gate_inp_shexp.weight"):
        first: Array = values[0]
        return first
    return values


def _named(model: Any, architecture: str) -> dict[str, Array]:
    """The model's tensors under GGUF names; with merged experts split, and without a head that is the embedding."""
    names = get_tensor_name_map(
        {name: key for key, name in MODEL_ARCH_NAMES.items()}[architecture], model.config.num_hidden_layers
    )
    found = {}
    for target, tensor in model.state_dict().items():
        if target == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        base, _, kind = target.rpartition(".") if re.search(r"\.(weight|bias)$", target) else (target, "", "weight")
        values = tensor.numpy()
        parts = {base: values}
        if base.endswith("gate_up_proj") and ".experts." in base:
            gate, up = np.split(values, 2, axis=1)
            stem = base.removesuffix("gate_up_proj")
            parts = {f"{stem}gate_proj": gate, f"{stem}up_proj": up}
        for part, content in parts.items():
            name = names.get_name(part)
            assert name is not None, part
            full = f"{name}.{kind}"
            found[full] = np.ascontiguousarray(_as_llama_cpp_writes(full, content, architecture, model.config))
    return found


def write_gguf(path: Path, model: Any, architecture: str, extra: dict[str, Array] | None = None) -> None:
    """Write ``model`` in fp32, without a tokenizer."""
    config = model.config
    writer = GGUFWriter(path, architecture)
    counts = {"block_count": config.num_hidden_layers, "vocab_size": config.vocab_size}
    counts |= {"attention.head_count": config.num_attention_heads}
    counts |= {"attention.head_count_kv": getattr(config, "num_key_value_heads", config.num_attention_heads)}
    for key, value in counts.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    for name, values in (_named(model, architecture) | (extra or {})).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
