"""Keys of a GGUF file outside its architecture and tokenizer: what kind of file it is, and how to sample from it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from specrt.engines.errors import SourceError, UnsupportedModelError
from specrt.exporter.sources.gguf.file import GgufFile

# The other keys of general.* (authors, licence, origin, format) have no effect on the output. Unknown namespaces are
# notes of some tool: llama.cpp, for which files are written, does not read them either.
_NAMESPACES = {
    "adapter": "an adapter, not a whole model",
    "clip": "an image or audio encoder, not a text model",
    "diffusion": "a diffusion model, which is not decoded token by token",
    "imatrix": "statistics for quantization, not a model",
    "xielu": "activations with parameters of their own, which are not read",
}
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def check_general(gguf: GgufFile) -> None:
    """Raise ``SourceError`` for a file that is no model, ``UnsupportedModelError`` for a kind that is not exported."""
    kind = gguf.metadata.get("general.type", "model")
    if kind != "model":
        raise SourceError(f"{gguf.path}: general.type is {kind!r}, expected 'model'; give the GGUF file of the model")
    for key in gguf.metadata:
        reason = _NAMESPACES.get(key.split(".")[0])
        if reason is not None and not key.startswith(f"{gguf.architecture}."):
            raise UnsupportedModelError(f"{gguf.path}: has {key}: {reason}")


def sampling_of(gguf: GgufFile) -> Any:
    """The recommended sampling settings (``general.sampling.*``) by transformers' names, or None without any."""
    found = {name: gguf.metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return SimpleNamespace(**found) if any(value is not None for value in found.values()) else None
