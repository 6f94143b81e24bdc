"""Tensors of a file that a text model need not read, each with the reason why it has no effect on the output.

Any other unread tensor means that the loaded model is not the file's, and is refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|blk)\.(\d+)\.")
_NUM_MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")


def layer_of(name: str) -> int | None:
    """The index of the layer that tensor ``name`` belongs to, or None."""
    return int(match.group(1)) if (match := _LAYER.search(name)) else None


def _any(tensor: torch.Tensor, config: Any, name: str) -> bool:
    return True


def _is_causal_mask(tensor: torch.Tensor, config: Any, name: str) -> bool:
    """[1, 1, n, n] with ones (or True) up to the diagonal, or the one number that masks with it."""
    if tensor.numel() == 1:
        return float(tensor) <= -1e4
    if tensor.dim() != 4 or tensor.shape[:2] != (1, 1) or tensor.shape[2] != tensor.shape[3]:
        return False
    mask = tensor[0, 0].bool()
    return bool((mask == torch.ones_like(mask).tril()).all())


def _counts_up(tensor: torch.Tensor, config: Any, name: str) -> bool:
    flat = tensor.reshape(-1)
    return bool((flat == torch.arange(flat.numel(), dtype=flat.dtype)).all())


def _is_extra_layer(tensor: torch.Tensor, config: Any, name: str) -> bool:
    """A layer after the last one that the config declares for multi-token prediction."""
    extra = next((n for key in _NUM_MTP_LAYERS if (n := getattr(config, key, None))), 0)
    layer, num_layers = layer_of(name), config.num_hidden_layers
    return layer is not None and num_layers <= layer < num_layers + extra


@dataclass(frozen=True)
class _Harmless:
    """Tensors named ``pattern`` for which ``holds`` (of tensor, text config and name) is true."""

    pattern: re.Pattern[str]
    what: str
    holds: Callable[[torch.Tensor, Any, str], bool] = _any


# Buffers are computed from the config. A multi-token-prediction head only drafts, and plain decoding never runs it.
# A tower processes images or audio, and a bundle takes only text.
_TOWERS = (
    r"vision_tower|vision_model|vision_encoder|visual|image_newline|multi_modal_projector|mm_projector|vision_projector|"
    r"vision_embed_tokens|embed_vision|audio_tower|audio_model|audio_encoder|audio_projector|embed_audio|"
    r"talker|token2wav|code2wav"
)
_HARMLESS = (
    _Harmless(re.compile(r"(^|\.)(inv_freq|cos_cached|sin_cached)$"), "rotary tables, computed from the config"),
    _Harmless(
        re.compile(r"\.(attn|attention|self_attn)\.(bias|masked_bias|causal_mask)$"), "causal masks", _is_causal_mask
    ),
    _Harmless(re.compile(r"(^|\.)position_ids$"), "position ids that count up", _counts_up),
    _Harmless(re.compile(r"^(model\.)?(mtp|mtp_layers|mtp_block)\."), "a multi-token-prediction head"),
    _Harmless(_LAYER, "a multi-token-prediction head", _is_extra_layer),
    _Harmless(re.compile(rf"^(model\.|thinker\.)?({_TOWERS})(\.|$)"), "an image or audio tower"),
    _Harmless(re.compile(r"^rope_(freqs|factors_long|factors_short)\.weight$"), "rope factors, part of the config"),
)
# Buffers that a model registers as persistent although they are computed from the config: files may lack them.
_COMPUTED = re.compile(r"(^|\.)(inv_freq|position_ids|cos_cached|sin_cached|masked_bias|causal_mask)$|\.attn\.bias$")


def split_unread(
    names: Iterable[str], read: Callable[[str], torch.Tensor], config: Any
) -> tuple[dict[str, int], list[str]]:
    """(number of harmless tensors by what they are, names that must be read) of unread tensors ``names``.

    ``read`` gives a tensor of the file by its name; ``config`` is the text config.
    """
    harmless: Counter[str] = Counter()
    harmful = []
    for name in names:
        rows = (row for row in _HARMLESS if row.pattern.search(name) and row.holds(read(name), config, name))
        if row := next(rows, None):
            harmless[row.what] += 1
        else:
            harmful.append(name)
    return dict(harmless), harmful


def is_computed_buffer(name: str, model: Any) -> bool:
    """Whether ``name`` is a buffer of ``model``, not a parameter, that is computed from its config."""
    return bool(_COMPUTED.search(name)) and name in {buffer for buffer, _ in model.named_buffers()}
