"""The config of a GGUF file: every metadata key of its architecture becomes a field of transformers' config, is known
to have no effect, or is refused by name.

transformers' own reading of a GGUF file drops keys that it does not know and takes its class's default for them (the
head size of Qwen 3, the rotary base of Starcoder 2, all rope scaling). Here the config is made from the rows of
``specrt.exporter.sources.gguf.architectures``.
"""

from __future__ import annotations

import math
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specrt.engines.errors import SourceError, UnsupportedModelError
from specrt.exporter.sources.gguf.architectures import (
    ARCHITECTURES,
    COMMON,
    COUNTS,
    Architecture,
    Fields,
    Into,
    Only,
    Use,
    even_head_dim,
)
from specrt.exporter.sources.gguf.file import GgufFile, Strings
from specrt.exporter.sources.gguf.general import check_general
from specrt.exporter.sources.gguf.rope import ROPE_KEYS, Rope, rope_of
from specrt.exporter.sources.gguf.tokens import special_ids

_ELSEWHERE = "export the model from its Hugging Face folder instead"


def config_from_gguf(gguf: GgufFile) -> Any:
    """The transformers config that ``gguf`` describes.

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
    uses = {**COMMON, **architecture.keys}
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
    config_class = CONFIG_MAPPING[architecture.model_type]
    declared = getattr(config_class, "__dataclass_fields__", {})
    if "head_dim" not in declared and fields["head_dim"] == even_head_dim(fields):
        del fields["head_dim"]  # not a field of this config class, and models compute the same value
    if "original_max_position_embeddings" in declared:  # read from there, not from rope_parameters
        original = fields["rope_parameters"].get("original_max_position_embeddings", fields["max_position_embeddings"])
        fields["original_max_position_embeddings"] = original
    return config_class(**fields)


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
    return fields


def _number(gguf: GgufFile, key: str, value: Any) -> Any:
    """The number or flag of a key. A list that repeats one number for each layer counts as that number."""
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise UnsupportedModelError(
                f"{gguf.path}: {gguf.architecture}.{key} differs from layer to layer ({str(value)[:60]}); {_ELSEWHERE}"
            )
        value = value[0]
    if isinstance(value, str | Strings) or (isinstance(value, float) and not math.isfinite(value)):
        raise SourceError(f"{gguf.path}: {gguf.architecture}.{key} is {value!r}, expected a number; convert it again")
    if key in COUNTS and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise SourceError(f"{gguf.path}: {gguf.architecture}.{key} is {value!r}, expected at least 1; convert it again")
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
    """The number of rows of the embedding, which the key must match."""
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
            f"{gguf.path}: {gguf.architecture}.rope.dimension_count is not the size of a head, and transformers "
            f"rotates whole heads; {_ELSEWHERE}"
        )
    parameters = dict(rope.parameters)
    if architecture.is_partial:
        parameters["partial_rotary_factor"] = rope.share
    if architecture.has_local_rope:
        local = {"rope_type": "default", "rope_theta": rope.local_theta or 10000.0}
        return {"rope_parameters": {"full_attention": parameters, "sliding_attention": local}}
    if rope.local_theta not in (None, parameters["rope_theta"]):
        raise UnsupportedModelError(
            f"{gguf.path}: {gguf.architecture}.rope.freq_base_swa is for no layer; {_ELSEWHERE}"
        )
    return {"rope_parameters": parameters}


def _is_tied(gguf: GgufFile, architecture: Architecture) -> bool:
    is_tied = "output.weight" not in gguf.tensors
    if is_tied and not architecture.is_tied_without_output:
        raise SourceError(
            f"{gguf.path}: the tensor output.weight is missing, and {gguf.architecture} has no tied one; "
            "convert it again"
        )
    return is_tied
