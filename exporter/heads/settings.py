"""What a head's config.json says, key by key. A key that is unknown and not off is refused, since it may matter."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from specrt.engines.errors import PairError, SourceError, UnsupportedModelError, kind_and_line
from specrt.exporter.heads.config import NUM_TAPS, FcNorm, HeadVariant, default_taps
from specrt.exporter.heads.layouts import Layout

_LAYER = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
)
_BIASES = ("attention_bias", "mlp_bias")
# Read in this file or in files.py.
_READ = {
    *(*_LAYER, *_BIASES, "vocab_size", "draft_vocab_size", "target_hidden_size", "num_hidden_layers"),
    *("rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window", "layer_types"),
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "eagle_config"),
    *("eagle_aux_hidden_state_layer_ids", "model_type", "architectures", "transformer_layer_config"),
}
# Of training, of the tokenizer, or of the target: no trainer's head computes with them.
_HARMLESS = re.compile(
    r"\w*_token_ids?|\w+_id|speculators_(model_type|version|config)|target_model_type|modal_type|embed_requires_grad|"
    r"_?name_or_path|transformers_version|torch_dtype|dtype|auto_map|has_no_defaults_at_init|use_cache|return_dict|"
    r"initializer_range|attention_dropout|pretraining_tp|tie_word_embeddings|max_window_layers|_attn_implementation\w*|"
    r"output_router_logits|router_aux_loss_coef|decoder_sparse_step|use_mrope|"
    r"add_classification_head|attention_head_dim|cla_share_factor|class_num|dense_list|norm_type|org_vocab_size|"
    r"pool_type|use_cla|use_qk_norm|use_rotary_pos_emb|is_decoder|is_encoder_decoder|id2label|label2id|problem_type|"
    r"chunk_size_feed_forward|output_(attentions|hidden_states)"
)
_ROTATION = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"),
    *("truncate", "mrope_section", "mrope_interleaved"),
}
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def check_keys(config: Mapping[str, Any], layout: Layout) -> None:
    """Raise ``UnsupportedModelError`` for keys that nothing reads and that are not off (null, false, 0, empty)."""
    eagle = _section(config, "eagle_config")
    unknown = [
        *_unknown(config, _READ, ""),
        *(_unknown(_section(config, layout.nested), _READ, f"{layout.nested}.") if layout.nested else ()),
        *_unknown(eagle, {"eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state", *_FLAGS}, "eagle_config."),
    ]
    if unknown:
        raise UnsupportedModelError(
            f"config.json of the head has {', '.join(unknown)}, which specrt does not know and which may change what "
            "the head computes; remove what has no effect"
        )
    if eagle.get("use_aux_hidden_state", True) is not True:
        raise UnsupportedModelError(
            "eagle_config.use_aux_hidden_state is off: the head reads the target's last hidden state only; "
            f"specrt reads heads with {NUM_TAPS} hidden states"
        )


def _unknown(section: Mapping[str, Any], known: set[str], prefix: str) -> list[str]:
    return [
        f"{prefix}{key} = {str(value)[:40]}"
        for key, value in section.items()
        if value and key not in known and not _HARMLESS.fullmatch(key)
    ]


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object at ``key``; ``config`` itself for the key "", and empty when there is none."""
    section = config if not key else config.get(key) or {}
    if not isinstance(section, Mapping):
        raise SourceError(f"config.json of the head: {key} is {section!r}, expected an object; correct it")
    return section


def layer_config(config: Mapping[str, Any], layout: Layout) -> tuple[Any, list[str]]:
    """(the transformers config of the head's one layer, notes). Raises ``UnsupportedModelError`` or ``SourceError``."""
    from transformers import LlamaConfig, Qwen3Config

    section = _section(config, layout.nested)
    kind = section.get("model_type", "qwen3" if layout.nested else "llama")
    if kind not in layout.layer_types:
        raise UnsupportedModelError(
            f"the head has a layer of type {kind!r}; for {layout.name} specrt reads {' and '.join(layout.layer_types)}"
        )
    if (number := section.get("num_hidden_layers", 1)) != 1:
        raise UnsupportedModelError(f"the head has {number} layers; specrt reads heads of one layer")
    if _slides(section):
        raise UnsupportedModelError("the head's layer attends to a sliding window; specrt reads full attention only")
    settings = {key: section[key] for key in _LAYER if section.get(key) is not None}
    settings |= {key: True for key in _BIASES if layout.reads_biases and section.get(key)}
    rotation, notes = _rotation(section)
    try:
        made = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](
            **settings, num_hidden_layers=1, rope_parameters=rotation, vocab_size=vocab_size(config, layout)
        )
    except Exception as error:  # transformers checks values by exceptions of many types
        raise SourceError(f"config.json of the head: {kind_and_line(error)}; correct it") from error
    return made, notes


def vocab_size(config: Mapping[str, Any], layout: Layout) -> int:
    """The number of the target's ids that the head was made for."""
    size = _section(config, layout.nested).get("vocab_size")
    if not isinstance(size, int):
        raise SourceError(f"config.json of the head: vocab_size is {size!r}, expected a number; correct it")
    return size


def _slides(section: Mapping[str, Any]) -> bool:
    if kinds := section.get("layer_types"):
        return bool(kinds[0] == "sliding_attention")
    return bool(section.get("use_sliding_window", section.get("sliding_window")))


def _rotation(section: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(``rope_parameters`` of transformers 5, notes) of a config of transformers 4 or 5."""
    given = dict(section.get("rope_parameters") or section.get("rope_scaling") or {})
    if unknown := [key for key, value in given.items() if value and key not in _ROTATION]:
        raise UnsupportedModelError(f"the head's rotation has {', '.join(unknown)}, which specrt does not know")
    kind = given.pop("type", None)
    kind = given.pop("rope_type", kind) or "default"
    is_mrope = kind == "mrope" or bool(given.get("mrope_section"))
    given = {key: value for key, value in given.items() if value is not None and not key.startswith("mrope")}
    if not is_mrope and kind not in _ROPE_TYPES:
        raise UnsupportedModelError(f"the head's rotation is {kind!r}; specrt reads {', '.join(_ROPE_TYPES)} and mrope")
    kind = "default" if kind == "mrope" else kind
    theta = given.pop("rope_theta", section.get("rope_theta") or 10000.0)
    note = "the rotation is mrope, which is the default one for text"
    return {**given, "rope_type": kind, "rope_theta": float(theta)}, [note] if is_mrope else []


def rotation_for(text_config: Any) -> dict[str, Any]:
    """``rope_parameters`` of a new head for a target of this config: the target's where heads have them, else plain.

    Of a rotation by kinds of layers it is that of full attention. A head rotates all columns.
    """
    given = getattr(text_config, "rope_parameters", None) or {}
    given = given.get("full_attention") or next((row for row in given.values() if isinstance(row, dict)), given)
    if given.get("rope_type", "default") not in _ROPE_TYPES:
        given = {"rope_theta": given.get("rope_theta")}
    read = {key: value for key, value in given.items() if value is not None and not key.startswith("mrope")}
    return {"rope_type": "default", "rope_theta": 10000.0, **{k: v for k, v in read.items() if k in _ROTATION}}


_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def variant(
    config: Mapping[str, Any], layout: Layout, num_layers: int, stored_norms: FcNorm, taps: Sequence[int] | None = None
) -> HeadVariant:
    """The variant that config.json states, for a target of ``num_layers``; ``taps`` replaces the config's.

    ``stored_norms``: the norms before the fusing matmul that the files hold, used when no flag is in config.json.
    Raises ``PairError`` for taps that the target does not have, ``UnsupportedModelError`` for flags that contradict.
    """
    eagle = _section(config, "eagle_config")
    flags = {key: config.get(key, eagle.get(key)) for key in _FLAGS}
    whole, each = bool(flags["norm_before_fc"]), bool(flags["fc_norm"])
    if whole and each:
        raise UnsupportedModelError("config.json of the head has both norm_before_fc and fc_norm; one of them at most")
    silent = flags["norm_before_fc"] is None and flags["fc_norm"] is None
    return HeadVariant(
        taps=_taps(config, eagle, layout, num_layers) if taps is None else check_taps(taps, num_layers),
        fc_norm="whole" if whole else "each" if each else stored_norms if silent else "none",
        norm_before_residual=bool(flags["norm_before_residual"]),
        norm_output=bool(flags["norm_output"]),
    )


def _taps(config: Mapping[str, Any], eagle: Mapping[str, Any], layout: Layout, num_layers: int) -> tuple[int, ...]:
    key = "eagle_aux_hidden_state_layer_ids"
    if eagle.get(key) and config.get(key):
        raise SourceError(
            f"config.json of the head has {key}, and eagle_config too, each with its own counting; remove one"
        )
    if ids := eagle.get(key):
        offset = layout.tap_offset
    elif ids := config.get(key):
        offset = 0
    else:
        ids, offset = default_taps(num_layers), 0
    if not isinstance(ids, list | tuple) or not all(isinstance(i, int) for i in ids):
        raise SourceError(f"config.json of the head: {key} is {ids!r}, expected numbers of layers; correct it")
    return check_taps([i + offset for i in ids], num_layers)


def check_taps(taps: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The taps. Raises ``UnsupportedModelError`` for another number of them, ``PairError`` for ones out of range."""
    if len(taps) != NUM_TAPS:
        raise UnsupportedModelError(f"the head reads {len(taps)} hidden states {list(taps)}; specrt reads {NUM_TAPS}")
    if min(taps) < 0 or max(taps) >= num_layers or len(set(taps)) != NUM_TAPS:
        raise PairError(
            f"the head reads hidden states {list(taps)} of a target with {num_layers} layers; expected {NUM_TAPS} "
            f"different ones of 0 to {num_layers - 1}: take the head's own target, or name them (--taps)"
        )
    return tuple(taps)
