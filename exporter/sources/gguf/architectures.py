"""The metadata keys of each GGUF architecture: the config field of each key, or why it has no effect on the output.

An absent key has llama.cpp's default, since files are written for llama.cpp. Rope keys are in
``specrt.exporter.sources.gguf.rope``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specrt.engines.errors import SourceError, UnsupportedModelError
from specrt.exporter.sources.gguf.file import GgufFile

Fields = dict[str, Any]


@dataclass(frozen=True)
class Into:
    """The key sets the config field ``name``. If absent, ``default(earlier fields)`` does; None: it is required."""

    name: str
    default: Callable[[Fields], Any] | None = None
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Only:
    """The key has no config field, and only values for which ``holds(value, fields)`` is true have no effect."""

    holds: Callable[[Any, Fields], bool]
    why: str


@dataclass(frozen=True)
class Harmless:
    """The key has no effect on the output, whatever its value."""

    why: str


Use = Into | Only | Harmless


def _is_zero(value: Any, fields: Fields) -> bool:
    return bool(value == 0)


def _is_one(value: Any, fields: Fields) -> bool:
    return value in (0, 1)  # llama.cpp takes 0 for "not set"


def _is_head_dim(value: Any, fields: Fields) -> bool:
    return bool(value == fields["head_dim"])


def _covers_all(value: Any, fields: Fields) -> bool:
    return bool(value == 0 or value >= fields["max_position_embeddings"])


def _none_if_zero(value: Any) -> Any:
    return value or None


def _heads(fields: Fields) -> Any:
    return fields["num_attention_heads"]


def even_head_dim(fields: Fields) -> int:
    return int(fields["hidden_size"] // fields["num_attention_heads"])


# Keys that are counts: at least 1, and the same in every layer.
COUNTS = (
    "context_length",
    "embedding_length",
    "block_count",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
)

_DENSE = "a mixture of experts, which transformers builds as a dense model"
_NO_SCALE = "transformers' model has no such scale"
_NO_CAP = "transformers' model has no soft cap there"

# In this order, since defaults use the fields before them.
COMMON: dict[str, Use] = {
    "context_length": Into("max_position_embeddings"),
    "embedding_length": Into("hidden_size"),
    "block_count": Into("num_hidden_layers"),
    "feed_forward_length": Into("intermediate_size"),
    "attention.head_count": Into("num_attention_heads"),
    "attention.head_count_kv": Into("num_key_value_heads", _heads),
    "attention.key_length": Into("head_dim", even_head_dim),
    "attention.value_length": Only(_is_head_dim, "values would be wider or narrower than keys"),
    "vocab_size": Into("vocab_size", lambda fields: None),
    "attention.causal": Only(lambda value, fields: value is True, "it attends to later tokens and cannot be decoded"),
    "attention.max_alibi_bias": Only(_is_zero, "transformers' model has no ALiBi"),
    "attention.clamp_kqv": Only(_is_zero, "transformers' model clamps nothing"),
    "attention.scale": Only(_is_zero, _NO_SCALE),
    "attention.output_scale": Only(_is_one, _NO_SCALE),
    "attention.sliding_window": Only(_covers_all, "transformers' model attends to all tokens"),
    "attn_logit_softcapping": Only(_is_zero, _NO_CAP),
    "final_logit_softcapping": Only(_is_zero, _NO_CAP),
    "router_logit_softcapping": Only(_is_zero, _NO_CAP),
    "logit_scale": Only(_is_one, _NO_SCALE),
    "residual_scale": Only(_is_one, _NO_SCALE),
    "embedding_scale": Only(_is_one, _NO_SCALE),
    "expert_count": Only(_is_zero, _DENSE),
    "expert_used_count": Only(_is_zero, _DENSE),
    "expert_shared_count": Only(_is_zero, _DENSE),
    "nextn_predict_layers": Only(_is_zero, "block_count includes layers of multi-token prediction"),
    "use_parallel_residual": Only(lambda value, fields: value is False, "attention and FFN follow each other here"),
    "pooling_type": Harmless("pools hidden states into embeddings, which logits do not use"),
    "tensor_data_layout": Only(lambda value, fields: value == "", "the order of rows in its tensors is unknown"),
}


@dataclass(frozen=True)
class Architecture:
    """A GGUF architecture: transformers' ``model_type``, its own ``keys``, and fields that depend on tensor names.

    ``biases`` are fields that are true when a tensor of the first block exists. ``is_partial``: a part of the head's
    dimensions may rotate. ``scalings``: rope types of transformers that its model computes as llama.cpp does.
    ``has_local_rope``: its sliding layers have their own rope base.
    """

    model_type: str
    keys: dict[str, Use]
    biases: dict[str, str] = field(default_factory=dict)
    extra: Callable[[GgufFile, Fields], Fields] = lambda gguf, fields: {}
    is_partial: bool = False
    scalings: tuple[str, ...] = ("default", "linear", "yarn", "longrope")
    has_local_rope: bool = False
    is_tied_without_output: bool = True


def _rms(name: str) -> dict[str, Use]:
    return {"attention.layer_norm_rms_epsilon": Into(name)}


def _layer_norm(name: str) -> dict[str, Use]:
    return {"attention.layer_norm_epsilon": Into(name)}


def _sliding(gguf: GgufFile, fields: Fields, period: int) -> list[str]:
    """The type of each layer. The key is a period, whose last layer has full attention, or a flag for each layer."""
    pattern = gguf.of_architecture().get("attention.sliding_window_pattern", period)
    count = fields["num_hidden_layers"]
    if not fields["sliding_window"]:
        return ["full_attention"] * count
    if isinstance(pattern, list):
        flags = [bool(flag) for flag in pattern]
        if len(flags) != count:
            raise SourceError(
                f"{gguf.path}: attention.sliding_window_pattern has {len(flags)} layers, expected {count}"
            )
    else:
        flags = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(count)]
    return ["sliding_attention" if flag else "full_attention" for flag in flags]


def _gemma(period: int, largest: int) -> Callable[[GgufFile, Fields], Fields]:
    """Gemma 2 and 3. Queries are scaled by the head size, but in the largest model by hidden size / heads."""

    def extra(gguf: GgufFile, fields: Fields) -> Fields:
        is_largest = fields["num_hidden_layers"] == largest
        scalar = even_head_dim(fields) if is_largest else fields["head_dim"]
        return {"query_pre_attn_scalar": scalar, "layer_types": _sliding(gguf, fields, period)}

    return extra


def _stablelm(gguf: GgufFile, fields: Fields) -> Fields:
    if fields["head_dim"] != even_head_dim(fields):
        raise UnsupportedModelError(
            f"{gguf.path}: stablelm with heads of {fields['head_dim']}, expected hidden / heads"
        )
    return {"use_parallel_residual": "blk.0.ffn_norm.weight" not in gguf.tensors}


_MOE: dict[str, Use] = {
    "expert_count": Into("num_experts"),
    "expert_used_count": Into("num_experts_per_tok"),
    "expert_feed_forward_length": Into(
        "moe_intermediate_size", lambda fields: fields["intermediate_size"] // fields["num_experts_per_tok"]
    ),
    "expert_weights_scale": Only(_is_one, _NO_SCALE),
    "expert_gating_func": Only(lambda value, fields: value in (0, 1), "transformers' model gates by softmax"),
}
_ATTENTION_BIAS = {"attention_bias": "attn_q.bias"}
_PATTERN: dict[str, Use] = {"attention.sliding_window_pattern": Harmless("read into layer_types")}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "llama",
        {
            **_rms("rms_norm_eps"),
            "tensor_data_layout": Only(
                lambda value, fields: value == "Meta AI original pth", "the order of rows in its tensors is unknown"
            ),
        },
        biases={**_ATTENTION_BIAS, "mlp_bias": "ffn_up.bias"},
    ),
    "qwen2": Architecture("qwen2", _rms("rms_norm_eps")),
    "qwen3": Architecture("qwen3", _rms("rms_norm_eps"), biases=_ATTENTION_BIAS),
    "qwen2moe": Architecture(
        "qwen2_moe",
        {
            **_rms("rms_norm_eps"),
            **_MOE,
            "expert_shared_feed_forward_length": Into(
                "shared_expert_intermediate_size", lambda fields: fields["intermediate_size"]
            ),
            "expert_weights_norm": Into("norm_topk_prob", lambda fields: False),
        },
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        {
            **_rms("rms_norm_eps"),
            **_MOE,
            "feed_forward_length": Into("intermediate_size", lambda fields: 0),
            "expert_weights_norm": Into("norm_topk_prob", lambda fields: True),
        },
        biases=_ATTENTION_BIAS,
    ),
    "phi3": Architecture(
        "phi3",
        {
            **_rms("rms_norm_eps"),
            "attention.sliding_window": Into("sliding_window", lambda fields: None, _none_if_zero),
        },
        is_partial=True,
        scalings=("default", "longrope"),
    ),
    "gemma2": Architecture(
        "gemma2",
        {
            **_rms("rms_norm_eps"),
            **_PATTERN,
            "attention.sliding_window": Into("sliding_window", lambda fields: 4096),
            "attn_logit_softcapping": Into("attn_logit_softcapping", lambda fields: 50.0, _none_if_zero),
            "final_logit_softcapping": Into("final_logit_softcapping", lambda fields: 30.0, _none_if_zero),
        },
        extra=_gemma(period=2, largest=46),
    ),
    "gemma3": Architecture(
        "gemma3_text",
        {
            **_rms("rms_norm_eps"),
            **_PATTERN,
            "attention.sliding_window": Into("sliding_window", lambda fields: None, _none_if_zero),
            "final_logit_softcapping": Into("final_logit_softcapping", lambda fields: None, _none_if_zero),
        },
        extra=_gemma(period=6, largest=62),
        scalings=("default", "linear"),
        has_local_rope=True,
    ),
    "stablelm": Architecture(
        "stablelm",
        {
            **_layer_norm("layer_norm_eps"),
            "use_parallel_residual": Harmless("converters write it wrongly; llama.cpp goes by ffn_norm, and so do we"),
        },
        biases={"use_qkv_bias": "attn_q.bias"},
        extra=_stablelm,
        is_partial=True,
        is_tied_without_output=False,
    ),
    "starcoder2": Architecture("starcoder2", _layer_norm("norm_epsilon"), biases={"use_bias": "attn_q.bias"}),
    "nemotron": Architecture(
        "nemotron",
        _layer_norm("norm_eps"),
        biases={**_ATTENTION_BIAS, "mlp_bias": "ffn_up.bias"},
        is_partial=True,
        is_tied_without_output=False,
    ),
}
