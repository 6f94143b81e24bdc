"""The quantization method that a config states, and its reader."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specrt.engines.errors import SourceError, UnsupportedModelError
from specrt.exporter.sources.checkpoint import Checkpoint
from specrt.exporter.sources.prequantized.awq import awq_format
from specrt.exporter.sources.prequantized.bitsandbytes import bitsandbytes_format
from specrt.exporter.sources.prequantized.compressed_tensors import compressed_tensors_format
from specrt.exporter.sources.prequantized.decoding import DecodedCheckpoint, Format
from specrt.exporter.sources.prequantized.gptq import gptq_format
from specrt.exporter.sources.prequantized.scaling import fp8_format

FORMATS: dict[str, Callable[[Mapping[str, Any]], Format]] = {
    "gptq": gptq_format,
    "awq": awq_format,
    "compressed-tensors": compressed_tensors_format,
    "bitsandbytes": bitsandbytes_format,
    "fp8": fp8_format,
}
# Settings files that config.json does not repeat, and their method.
SETTINGS_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
# Keys that only one method has, for settings that do not name their method.
_METHOD_OF_KEY = (("config_groups", "compressed-tensors"), ("w_bit", "awq"), ("desc_act", "gptq"))


@dataclass(frozen=True)
class Prequantized:
    """A config without its quantization, the decoder of the files' tensors, and notes for the user."""

    config: Any
    decode: Callable[[Checkpoint], Checkpoint]
    notes: tuple[str, ...]


def find_prequantized(
    name: str, config: Any, find: Callable[[str], Path | None], trust_remote_code: bool = False
) -> Prequantized | None:
    """How the weights of ``config`` are quantized, or None when they are not. ``find`` gives a file of the model.

    Raises ``UnsupportedModelError`` that names a method or variant that is not read here.
    """
    method, settings = _settings(name, config, find)
    if settings is None:
        return None
    if method not in FORMATS:
        raise UnsupportedModelError(
            f"{name}: its weights are quantized by {method!r}, which is not read here; {', '.join(FORMATS)} are; "
            "export the model that it was made from"
        )
    try:
        form = FORMATS[method](settings)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name}: {error}") from error
    plain = _without_quantization(config)

    def decode(stored: Checkpoint) -> Checkpoint:
        return DecodedCheckpoint(stored, form, _transposed_modules(plain, trust_remote_code).__contains__)

    return Prequantized(plain, decode, tuple(_notes(form, settings)))


def _settings(
    name: str, config: Any, find: Callable[[str], Path | None]
) -> tuple[str | None, Mapping[str, Any] | None]:
    """(method, settings) of config.json, or of a file next to it."""
    for place in (config, config.get_text_config()):
        for key in ("quantization_config", "compression_config"):
            found = getattr(place, key, None)
            if found is not None:
                settings = found if isinstance(found, Mapping) else found.to_dict()
                return _method(settings), settings
    for file, method in SETTINGS_FILES.items():
        path = find(file)
        if path is not None:
            try:
                settings = json.loads(path.read_text(encoding="utf-8-sig"))
                return str(settings.get("quant_method") or method), settings
            except (OSError, ValueError, AttributeError) as error:
                raise SourceError(f"{name}: {file} is not a JSON object ({error}); download it again") from error
    return None, None


def _method(settings: Mapping[str, Any]) -> str | None:
    named = settings.get("quant_method")
    if named is not None:
        method = str(getattr(named, "value", named)).lower()
        return "bitsandbytes" if method.startswith("bitsandbytes") else method
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    return next((method for key, method in _METHOD_OF_KEY if key in settings), None)


def _without_quantization(config: Any) -> Any:
    plain = copy.deepcopy(config)
    for place in (plain, plain.get_text_config()):
        for key in ("quantization_config", "compression_config"):
            if key in vars(place):
                delattr(place, key)
    return plain


def _notes(form: Format, settings: Mapping[str, Any]) -> list[str]:
    notes = [f"its weights are quantized by {form.name}, and are dequantized as they are read"]
    groups = [g for g in (settings.get("config_groups") or {}).values() if isinstance(g, Mapping)]
    ordered = settings.get("desc_act") or any((g.get("weights") or {}).get("actorder") for g in groups)
    if ordered:
        notes.append(
            "its groups may follow the order of activations (act-order): where one is scattered over columns, int4 "
            "rounds the weights again instead of keeping the file's own steps"
        )
    if form.dropped and (settings.get("activation_scheme") or any(g.get("input_activations") for g in groups)):
        notes.append("it was made to round activations too; here they stay floats")
    return notes


def _transposed_modules(config: Any, trust_remote_code: bool) -> frozenset[str]:
    """Names of modules that keep their weight as [K, N] (GPT-2's Conv1D), while the files hold [N, K]."""
    from transformers import AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)
    return frozenset(name for name, module in model.named_modules() if isinstance(module, Conv1D))
