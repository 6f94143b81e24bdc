"""The config of a GGUF file: every metadata key of its architecture becomes a field of transformers' config, is known to
change no answer, or is refused by name.

transformers' own reading of a GGUF file drops keys that it does not know and takes its class's default for them (the
head size of Qwen 3, the rotary base of Starcoder 2, all rope scaling). Here the config is made from the table below, and
a key that is absent has llama.cpp's default, since that is what files are written for. Rope is in ``gguf_rope``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specrt.engines.errors import SourceError, UnsupportedModelError
from specrt.exporter.sources.gguf_file import GgufFile, Strings
from specrt.exporter.sources.gguf_general import check_general
from specrt.exporter.sources.gguf_rope import ROPE_KEYS, Rope, rope_of
from specrt.exporter.sources.gguf_tokens import special_ids

Fields = dict[str, Any]
_ELSEWHERE = "export the model from its Hugging Face folder instead"


@dataclass(frozen=True)
class Into:
    """The key's value is the config's ``name``; when it is absent, ``default`` of the fields so far, or it is needed."""

    name: str
    default: Callable[[Fields], Any] | None = None
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Only:
    """No field takes the key: only values for which ``holds`` (of value and fields) is true change nothing."""

    holds: Callable[[Any, Fields], bool]
    why: str


@dataclass(frozen=True)
class Harmless:
    """Whatever the value, it changes no answer."""

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


def _even_head_dim(fields: Fields) -> int:
    return int(fields["hidden_size"] // fields["num_attention_heads"])


_DENSE = "a mixture of experts, which transformers builds as a dense model"
_NO_SCALE = "transformers' model has no such scale"
_NO_CAP = "transformers' model has no soft cap there"

# In this order, since defaults look at what is before them.
_COMMON: dict[str, Use] = {
    "context_length": Into("max_position_embeddings"),
    "embedding_length": Into("hidden_size"),
    "block_count": Into("num_hidden_layers"),
    "feed_forward_length": Into("intermediate_size"),
    "attention.head_count": Into("num_attention_heads"),
    "attention.head_count_kv": Into("num_key_value_heads", _heads),
    "attention.key_length": Into("head_dim", _even_head_dim),
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
    "pooling_type": Harmless("pools hidden states into embeddings, beside the logits"),
    "tensor_data_layout": Only(lambda value, fields: value == "", "the order of rows in its tensors is unknown"),
}


@dataclass(frozen=True)
class Architecture:
    """A GGUF architecture: transformers' ``model_type``, its own ``keys``, and what the names of tensors decide.

    ``biases`` are fields that are true when a tensor of the first block is there. ``is_partial``: fewer dimensions
    than the head's may rotate. ``scalings``: rope types of transformers that its model computes as llama.cpp does.
    """

    model_type: str
    keys: dict[str, Use]
    biases: dict[str, str] = field(default_factory=dict)
    extra: Callable[[GgufFile, Fields], Fields] = lambda gguf, fields: {}
    is_partial: bool = False
    scalings: tuple[str, ...] = ("default", "linear", "yarn", "longrope")
    is_tied_without_output: bool = True


def _rms(name: str) -> dict[str, Use]:
    return {"attention.layer_norm_rms_epsilon": Into(name)}


def _layer_norm(name: str) -> dict[str, Use]:
    return {"attention.layer_norm_epsilon": Into(name)}


def _sliding(gguf: GgufFile, fields: Fields, period: int) -> list[str]:
    """The kind of each layer. The key is a period, of which the last layer is full, or a flag for each layer."""
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
        scalar = _even_head_dim(fields) if is_largest else fields["head_dim"]
        return {"query_pre_attn_scalar": scalar, "layer_types": _sliding(gguf, fields, period)}

    return extra


def _stablelm(gguf: GgufFile, fields: Fields) -> Fields:
    return {"use_parallel_residual": "blk.0.ffn_norm.weight" not in gguf.tensors}


_MOE: dict[str, Use] = {
    "expert_count": Into("num_experts"),
    "expert_used_count": Into("num_experts_per_tok"),
    "expert_feed_forward_length": Into("moe_intermediate_size"),
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
            "expert_shared_feed_forward_length": Into("shared_expert_intermediate_size", lambda fields: None),
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


def config_from_gguf(gguf: GgufFile) -> Any:
    """The transformers config that ``gguf`` states.

    Raises ``UnsupportedModelError`` for a key or architecture that cannot be honoured, ``SourceError`` for values that
    contradict each other.
    """
    check_general(gguf)
    architecture = ARCHITECTURES.get(gguf.architecture)
    if architecture is None:
        raise UnsupportedModelError(
            f"{gguf.path}: GGUF architecture {gguf.architecture!r}, expected one of {', '.join(ARCHITECTURES)}; "
            f"{_ELSEWHERE}"
        )
    uses = {**_COMMON, **architecture.keys}
    stated = gguf.of_architecture()
    fields = _fields(gguf, stated, uses)
    _check_keys(gguf, stated, uses, fields)
    fields["vocab_size"] = _vocab_size(gguf, fields["vocab_size"])
    fields |= {name: f"blk.0.{tensor}" in gguf.tensors for name, tensor in architecture.biases.items()}
    fields |= architecture.extra(gguf, fields)
    rope = rope_of(gguf, fields["head_dim"], fields["max_position_embeddings"])
    fields |= _rope_fields(gguf, architecture, rope)
    fields["tie_word_embeddings"] = _is_tied(gguf, architecture)
    fields |= special_ids(gguf, fields["vocab_size"])
    if fields["head_dim"] == _even_head_dim(fields):
        # Some configs have no such field, though their models look for it. Those that have one need it.
        config_class = CONFIG_MAPPING[architecture.model_type]
        if "head_dim" not in getattr(config_class, "__dataclass_fields__", {}):
            del fields["head_dim"]
    elif architecture.model_type == "stablelm":
        raise UnsupportedModelError(f"{gguf.path}: stablelm with heads of {fields['head_dim']}; {_ELSEWHERE}")
    return CONFIG_MAPPING[architecture.model_type](**fields)


def _fields(gguf: GgufFile, stated: dict[str, Any], uses: dict[str, Use]) -> Fields:
    fields: Fields = {}
    for key, use in uses.items():
        if not isinstance(use, Into):
            continue
        if key in stated:
            fields[use.name] = use.convert(_number(gguf, key, stated[key]))
        elif use.default is None:
            raise SourceError(f"{gguf.path}: {gguf.architecture}.{key} is missing; convert the model again")
        else:
            fields[use.name] = use.default(fields)
    if any(not isinstance(fields[name], int) or fields[name] < 1 for name in ("hidden_size", "num_attention_heads")):
        raise SourceError(f"{gguf.path}: embedding_length or attention.head_count is not positive; convert it again")
    return fields


def _number(gguf: GgufFile, key: str, value: Any) -> Any:
    """A key's one number or flag; a list of one number a layer is that number."""
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise UnsupportedModelError(
                f"{gguf.path}: {gguf.architecture}.{key} differs from layer to layer ({str(value)[:60]}); {_ELSEWHERE}"
            )
        value = value[0]
    if isinstance(value, str | Strings) or (isinstance(value, float) and not math.isfinite(value)):
        raise SourceError(f"{gguf.path}: {gguf.architecture}.{key} is {value!r}, expected a number; convert it again")
    return value


def _check_keys(gguf: GgufFile, stated: dict[str, Any], uses: dict[str, Use], fields: Fields) -> None:
    for key, value in stated.items():
        name = f"{gguf.architecture}.{key}"
        if key in ROPE_KEYS:
            continue
        use = uses.get(key)
        if use is None:
            raise UnsupportedModelError(
                f"{gguf.path}: the metadata key {name} (here {str(value)[:40]}) is not known, and may change the "
                f"model's answers; {_ELSEWHERE}"
            )
        if isinstance(use, Only) and not use.holds(value, fields):
            raise UnsupportedModelError(f"{gguf.path}: {name} is {value!r}: {use.why}; {_ELSEWHERE}")


def _vocab_size(gguf: GgufFile, stated: Any) -> int:
    """Rows of the embedding, which the key has to agree with."""
    if "token_embd.weight" not in gguf.tensors:
        raise SourceError(f"{gguf.path}: the tensor token_embd.weight is missing; convert the model again")
    rows = gguf.tensors["token_embd.weight"].shape[0]
    if stated is not None and stated != rows:
        raise SourceError(
            f"{gguf.path}: vocab_size is {stated}, and token_embd.weight has {rows} rows; convert it again"
        )
    return rows


def _rope_fields(gguf: GgufFile, architecture: Architecture, rope: Rope) -> Fields:
    kind = rope.parameters["rope_type"]
    if kind not in architecture.scalings:
        raise UnsupportedModelError(
            f"{gguf.path}: rope scaling of type {kind} in {gguf.architecture}, of which transformers computes only "
            f"{', '.join(architecture.scalings)}; {_ELSEWHERE}"
        )
    if rope.share != 1.0 and not architecture.is_partial:
        raise UnsupportedModelError(
            f"{gguf.path}: {gguf.architecture}.rope.dimension_count is not the size of a head, and transformers rotates "
            f"whole heads; {_ELSEWHERE}"
        )
    parameters = dict(rope.parameters)
    if architecture.is_partial:
        parameters["partial_rotary_factor"] = rope.share
    if architecture.model_type == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": rope.local_theta or 10000.0}
        return {"rope_parameters": {"full_attention": parameters, "sliding_attention": local}}
    if rope.local_theta not in (None, parameters["rope_theta"]):
        raise UnsupportedModelError(
            f"{gguf.path}: {gguf.architecture}.rope.freq_base_swa is for no layer; {_ELSEWHERE}"
        )
    original = parameters.get("original_max_position_embeddings")
    is_phi = architecture.model_type == "phi3" and original is not None
    return {"rope_parameters": parameters, **({"original_max_position_embeddings": original} if is_phi else {})}


def _is_tied(gguf: GgufFile, architecture: Architecture) -> bool:
    is_tied = "output.weight" not in gguf.tensors
    if is_tied and not architecture.is_tied_without_output:
        raise SourceError(
            f"{gguf.path}: the tensor output.weight is missing, and {gguf.architecture} has no tied one; convert it again"
        )
    return is_tied
