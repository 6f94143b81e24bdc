"""Why a model cannot be exported: from its config, and from where and how its code failed.

No architecture is named here. Reasons that a config shows are rows of ``_BY_CONFIG``. All others are derived from the
exception that the model's code raised on the meta device, and from the class whose code raised it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from specrt.exporter.tracing.attention import IMPLEMENTATION, refuse
from specrt.exporter.tracing.state import Mask

# Layer types (``layer_types``) that have another state or see other tokens than a causal KV cache.
_LAYER_TYPES = {
    "linear_attention": "a recurrent state: linear attention or a state space model",
    "hybrid": "a recurrent state in addition to attention",
    "hybrid_sliding": "a recurrent state in addition to attention",
    "conv": "short convolutions over the last tokens, a state that is no KV cache",
    "chunked_attention": "a token sees its own chunk of the text only",
    "indexed_attention": "sparse attention to the keys that an indexer selects",
    "minimax_m3_sparse": "sparse attention to the keys that an indexer selects",
    "compressed_sparse_attention": "sparse attention over compressed keys",
    "heavily_compressed_attention": "attention over compressed keys",
    "moe": "experts without attention",
    "mlp": "no attention",
}
_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}

# Parameters of a model's own attention code that show what it adds.
_OWN_PARAMETERS = {"alibi": "ALiBi position bias", "position_bias": "a position bias"}
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # what code that uses transformers' attention interface imports
_MODEL_CODE = ("transformers.models.", "transformers_modules.")


def refuse_by_config(config: Any, trust_remote_code: bool) -> Any:
    """Raise ``UnsupportedModelError`` for what the config alone shows; return the config of the text model."""
    name = config.model_type
    try:
        text = config.get_text_config()
    except ValueError:
        refuse(f"{name} is made of more than one text model")
    if getattr(config, "is_encoder_decoder", False):
        refuse(f"{name} is an encoder-decoder")
    for attribute, shows, words in _BY_CONFIG:
        value = _value(text, attribute)
        if value is not None and shows(value):
            refuse(f"{name} {words.format(value=value)}")
    kinds = sorted(set(getattr(text, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES)
    if kinds:
        words = "; ".join(dict.fromkeys(filter(None, map(_LAYER_TYPES.get, kinds))))
        refuse(f"{name} has layers of type {', '.join(kinds)}" + (f" ({words})" if words else ""))
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if not known and not (trust_remote_code and getattr(config, "auto_map", None)):
        refuse(f"transformers has no causal LM for model type {name!r}")
    if known and getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_is_stateful", False):
        refuse(f"{name} keeps a recurrent state instead of a KV cache")
    return text


def reason_of(error: BaseException, config: Any) -> str:
    """Why the model of ``config`` could not be run on the meta device, as one clause."""
    frame = _frame_of_model(error.__traceback__)
    owner = _owner(frame) or config.model_type
    adds = _additions(frame, config)
    if isinstance(error, KeyError) and error.args == (IMPLEMENTATION,):
        return f"{owner} chooses its attention from its own table, not through transformers' attention interface{adds}"
    if isinstance(error, ImportError):
        return f"its code needs a package that is not installed ({_one_line(error)})"
    if frame is not None and frame.f_code.co_name == "__init__":
        return f"{owner} cannot be built from its config ({type(error).__name__}: {_one_line(error)})"
    if frame is not None and (_uses_mask(frame, error) or _INTERFACE not in frame.f_globals):
        name = owner if "Attention" in owner else config.model_type
        return f"{name} computes attention in its own code, not through transformers' attention interface{adds}"
    if any(words in str(error) for words in _NO_VALUES):
        return f"the pass of {owner} depends on the values of its tensors, so it has no fixed graph{adds}"
    return f"{owner} does not run on ids alone with a KV cache{adds} ({type(error).__name__}: {_one_line(error)})"


_NO_VALUES = ("meta tensor", "no data!", "data-dependent", "data-independent")


def _frame_of_model(trace: TracebackType | None) -> FrameType | None:
    """The innermost frame in code of a model."""
    found = None
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        if module.startswith(_MODEL_CODE):
            found = trace.tb_frame
        trace = trace.tb_next
    return found


def _owner(frame: FrameType | None) -> str | None:
    """The class whose method runs in ``frame``, or that of the nearest caller in a model's code."""
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(_MODEL_CODE):
        if "self" in frame.f_locals:
            return type(frame.f_locals["self"]).__name__
        frame = frame.f_back
    return None


def _uses_mask(frame: FrameType, error: BaseException) -> bool:
    """Whether the code of ``frame`` failed because it reads the mask itself, as a tensor."""
    has_mask = any(isinstance(value, Mask) for value in frame.f_locals.values())
    return has_mask and "Mask" in str(error)


def _additions(frame: FrameType | None, config: Any) -> str:
    """What the attention adds, as far as the parameters of its code and the config show."""
    names = inspect.getargvalues(frame).args if frame is not None else []
    found = dict.fromkeys(words for name, words in _OWN_PARAMETERS.items() if name in names)
    if "local" in (_value(config, "attention_layers") or ()):
        found["layers of local attention"] = None
    return f", with {' and '.join(found)}" if found else ""


def _one_line(error: BaseException) -> str:
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= 160 else f"{line[:160]}..."


def _value(config: Any, attribute: str) -> Any:
    """The value of an attribute; where it differs from layer to layer, that of the first layer that has one."""
    try:
        return getattr(config, attribute, None)
    except RuntimeError:  # what a config whose layers differ raises
        values = (getattr(layer, attribute, None) for layer in config.per_layer_config)
        return next((value for value in values if value is not None), None)


def _is_dynamic(rope: Any) -> bool:
    """Also longrope of single layer types; that of the whole model is fixed at export (``longrope``)."""
    if not isinstance(rope, dict):
        return False
    kinds = [str(row.get("rope_type", "")) for row in rope.values() if isinstance(row, dict)]
    return "longrope" in kinds or any("dynamic" in kind for kind in (str(rope.get("rope_type", "")), *kinds))


def _has_alibi(attention: Any) -> bool:
    return bool(attention.get("alibi") if isinstance(attention, dict) else getattr(attention, "alibi", False))


# (attribute of the text config, whether its value rules out an export, the text after the model type)
_BY_CONFIG: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("kv_lora_rank", bool, "uses latent attention (MLA, kv_lora_rank {value})"),
    ("alibi", bool, "adds an ALiBi position bias to its attention scores"),
    ("attn_config", _has_alibi, "adds an ALiBi position bias to its attention scores"),
    ("num_kv_shared_layers", bool, "lets its last {value} layers read the KV cache of earlier ones (shared KV)"),
    ("cross_attention_layers", bool, "has layers of cross-attention to another input (layers {value})"),
    ("add_cross_attention", bool, "has cross-attention to another input"),
    ("rope_parameters", _is_dynamic, "uses dynamic rope scaling, which depends on the length reached: no fixed graph"),
)
