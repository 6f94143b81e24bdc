"""Model folders for tests of sources: tiny random models, and changes to what their files hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specrt.exporter.sources.loading import load_model
from specrt.exporter.sources.source import Source
from tests.exporter.tracing.architectures import tiny_model

Tensors = dict[str, torch.Tensor]
WEIGHTS = "model.safetensors"


def save_model(folder: Path, name: str = "llama", **overrides: Any) -> Path:
    """A random model of a row of ``tests.exporter.tracing.architectures``, without a tokenizer."""
    tiny_model(name, **overrides).save_pretrained(folder)
    return folder


def change_weights(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    tensors = change(load_file(folder / WEIGHTS))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"})


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def source_of(folder: Path, gguf_file: str | None = None, config: Any = None) -> Source:
    """The source of a folder without a tokenizer."""
    from transformers import AutoConfig

    config = config if config is not None else AutoConfig.from_pretrained(folder)
    return Source(folder.name, config, None, str(folder), {"gguf_file": gguf_file} if gguf_file else {})


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(source_of(folder), dtype)
