"""Why a file's tensors and a model's do not match, in one line that states a fix."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from specrt.exporter.sources.unread import layer_of

# The writers of names with these prefixes, the longest prefix first.
_PREFIXES = {
    "base_model.model.": "peft, for a model with an adapter; export the base model, and the adapter apart",
    "_orig_mod.": "torch.compile; save the model that was compiled ('model._orig_mod')",
    "_fsdp_wrapped_module.": "FSDP; save a full state dict",
    "module.": "DataParallel; save 'model.module'",
}
# Tensors that only quantized layers have, the most specific first.
_QUANTIZED = (
    (r"\.weight_packed$", "compressed-tensors"),
    (r"\.quant_state\.bitsandbytes", "bitsandbytes"),
    (r"\.g_idx$", "GPTQ"),
    (r"\.(qweight|qzeros)$", "AWQ or GPTQ"),
    (r"_(blocks|scales)$", "MXFP4"),
    (r"\.weight_scale(_inv)?$", "FP8 or compressed-tensors"),
    (r"\.(SCB|absmax)$", "bitsandbytes"),
)


def describe_missing(missing: Sequence[str], unread: Sequence[str], names: Sequence[str], config: Any) -> str:
    """What is wrong when the model has tensors ``missing`` that the file (with tensors ``names``) does not hold.

    ``unread`` are the file's tensors that nothing reads, ``config`` is the text config.
    """
    what = f"{_count(missing)} of the model {_are(missing)} not in its files, the first is {missing[0]}"
    if unread:
        what += f"; {_count(unread)} of the files {_are(unread)} read by nothing, the first is {unread[0]}"
    return f"{what}; {_hint(missing, unread, names, config)}"


def describe_unread(unread: Sequence[str], names: Sequence[str], config: Any) -> str:
    """What is wrong when nothing reads the file's tensors ``unread``."""
    what = f"{_count(unread)} of its files {_are(unread)} read by nothing, the first is {unread[0]}"
    return f"{what}; {_hint((), unread, names, config)}"


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}"


def _are(names: Sequence[str]) -> str:
    return "are" if len(names) > 1 else "is"


def _hint(missing: Sequence[str], unread: Sequence[str], names: Sequence[str], config: Any) -> str:
    for found in (
        _quantized(unread),
        _prefix(missing, unread),
        _layers(missing, unread, names, config),
        _head(missing),
    ):
        if found:
            return found
    if missing:
        return "download the whole model, or correct its config.json"
    return "correct its config.json, or remove what is not part of the model from its files"


def _quantized(unread: Sequence[str]) -> str | None:
    for pattern, method in _QUANTIZED:
        if any(re.search(pattern, name) for name in unread):
            return (
                f"these look like {method} weights, and config.json has no quantization_config for them: "
                "restore it, or export the model before quantization"
            )
    return None


def _prefix(missing: Sequence[str], unread: Sequence[str]) -> str | None:
    """The fix for a prefix by which an unread and a missing name differ."""
    for name in unread[:1]:
        for prefix, writer in _PREFIXES.items():
            if name.startswith(prefix):
                return f"the prefix {prefix!r} is put there by {writer}"
        for wanted in missing:
            if name.endswith(f".{wanted}"):
                return f"expected names without the prefix {name.removesuffix(wanted)!r}: rename the tensors"
    return None


def _layers(missing: Sequence[str], unread: Sequence[str], names: Sequence[str], config: Any) -> str | None:
    """The fix for a config with another number of layers than the files."""
    num_layers = getattr(config, "num_hidden_layers", None)
    held = {layer for name in names if (layer := layer_of(name)) is not None}
    if num_layers is None or not held or len(held) == num_layers:
        return None
    apart = [layer_of(name) for name in (*missing, *unread)]
    if None in apart or any(layer in held and layer < num_layers for layer in apart if layer is not None):
        return None
    return (
        f"config.json has num_hidden_layers {num_layers}, the files hold {len(held)}: "
        "correct it, or download the whole model"
    )


def _head(missing: Sequence[str]) -> str | None:
    if tuple(missing) in (("lm_head.weight",), ("output.weight",), ("embed_out.weight",)):
        return (
            "set tie_word_embeddings to true in config.json if the head is the embedding, "
            "or download a model that holds its head"
        )
    return None
