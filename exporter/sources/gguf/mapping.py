"""The map from a GGUF file's tensors to those of a transformers model, by gguf-py's names and our own conversions.

llama.cpp's converter changes some tensors as it writes them. Each change is one row here, inverted, and written
independently of transformers' loader, whose result is compared with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specrt.engines.errors import SourceError
from specrt.exporter.sources.mapping import FileMap, TensorMap

Inverse = Callable[[torch.Tensor, Any], torch.Tensor]


def _interleaved(heads: str) -> Inverse:
    """Rotary halves, which llama.cpp interleaves within each of the config's ``heads`` heads."""

    def inverse(tensor: torch.Tensor, config: Any) -> torch.Tensor:
        rows = tensor.reshape(getattr(config, heads), -1, 2, *tensor.shape[1:])  # [heads, head_dim / 2, 2, ...]
        return rows.transpose(1, 2).reshape(tensor.shape)

    return inverse


def _minus_one(tensor: torch.Tensor, config: Any) -> torch.Tensor:
    return tensor.float() - 1


def _transposed(tensor: torch.Tensor, config: Any) -> torch.Tensor:
    return tensor.T


def _with_axis(axis: int) -> Inverse:
    return lambda tensor, config: tensor.unsqueeze(axis)


@dataclass(frozen=True)
class _Row:
    """``inverse`` undoes what llama.cpp's converter does to tensors named ``pattern`` of ``architectures``."""

    architectures: tuple[str, ...]
    pattern: str
    inverse: Inverse


_ROWS = (
    _Row(("llama",), r"\.attn_q\.(weight|bias)$", _interleaved("num_attention_heads")),
    _Row(("llama",), r"\.attn_k\.(weight|bias)$", _interleaved("num_key_value_heads")),
    _Row(("gemma2", "gemma3", "nemotron"), r"norm\.weight$", _minus_one),
    _Row(("gpt2",), r"\.(attn_qkv|attn_output|ffn_up|ffn_down)\.weight$", _transposed),
    _Row(("lfm2",), r"\.shortconv\.conv\.weight$", _with_axis(1)),
    _Row(("qwen2moe",), r"\.ffn_gate_inp_shexp\.weight$", _with_axis(0)),
)
# Tensors that transformers merges into one; gguf-py has a name for each.
_MERGED = ((re.compile(r"\.experts\.gate_up_proj$"), (".experts.gate_proj", ".experts.up_proj")),)
_SUFFIX = re.compile(r"\.(weight|bias)$")
# Types of tensors that are stored as plain values; all others are blocks, whose values are computed.
VALUE_TYPES = ("F32", "F16", "BF16")


def map_gguf_names(model: Any, architecture: str, types: dict[str, str]) -> FileMap:
    """The map from a GGUF file's tensors to ``model``; ``types`` gives the block format of each tensor by name."""
    config = model.config.get_text_config()
    name_of = _gguf_names(architecture, config.num_hidden_layers)
    rows = [row for row in _ROWS if architecture in row.architectures]
    maps = []
    for target in model.state_dict():
        sources = _sources(target, name_of, types)
        if sources:
            inverses = [next((r.inverse for r in rows if re.search(r.pattern, name)), None) for name in sources]
            is_computed = any(types[name] not in VALUE_TYPES for name in sources)
            maps.append(TensorMap(sources, (target,), _converter(target, inverses, config), is_computed))
    used = {name for row in maps for name in row.sources}
    return FileMap(tuple(maps), tuple(name for name in types if name not in used))


def _gguf_names(architecture: str, num_layers: int) -> Callable[[str], str | None]:
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    known = {name: key for key, name in MODEL_ARCH_NAMES.items()}
    if architecture not in known:
        raise SourceError(f"GGUF architecture {architecture!r}: this gguf package has no names for it; update gguf")
    names = get_tensor_name_map(known[architecture], num_layers)
    return lambda name: names.get_name(name)


def _sources(target: str, name_of: Callable[[str], str | None], types: Collection[str]) -> tuple[str, ...]:
    """The file's tensors that make ``target``: one, several for merged experts, none when the file has none."""
    suffix = match.group() if (match := _SUFFIX.search(target)) else ""
    base = target.removesuffix(suffix)
    stems: Sequence[str] = (base,)
    for pattern, parts in _MERGED:
        if pattern.search(base):
            stems = [pattern.sub(part, base) for part in parts]
    names = [f"{name}{suffix or '.weight'}" for name in map(name_of, stems) if name]
    return tuple(names) if len(names) == len(stems) and all(name in types for name in names) else ()


def _converter(
    target: str, inverses: Sequence[Inverse | None], config: Any
) -> Callable[[Sequence[torch.Tensor]], dict[str, torch.Tensor]]:
    def convert(tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        parts = [t if f is None else f(t, config) for f, t in zip(inverses, tensors, strict=True)]
        return {target: parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)}  # experts: [E, gate then up, hidden]

    return convert
