"""A trained copy of a target's layers is saved, whatever the target's files are, and read back as a draft is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specrt.exporter.cutting import keep_layers
from specrt.exporter.options import ExportOptions
from specrt.exporter.training.loading import load_target
from specrt.exporter.training.saving import save_model
from tests.exporter.sources.gguf.gguf_files import config_of, model_of, write_gguf
from tests.tiny import save_tiny_model

IDS = torch.arange(40)[None]
SOURCES: dict[str, Callable[[Path], Path]] = {
    "folder": lambda place: save_tiny_model(place / "model"),
    "folder, tied": lambda place: save_tiny_model(place / "model", tie_word_embeddings=True),
    "GGUF": lambda place: write_gguf(place / "model.gguf", model_of(config_of("llama"))),
    "GGUF with layer types": lambda place: write_gguf(place / "model.gguf", model_of(config_of("gemma3")), "gemma3"),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_trained_model_is_read_back(source: str, tmp_path: Path) -> None:
    target = load_target(ExportOptions(str(SOURCES[source](tmp_path)), tmp_path), ())
    model = target.model
    keep_layers(model, [0])
    with torch.no_grad():
        next(iter(model.base_model.layers.parameters())).mul_(1.5)  # trained
        expected = model(input_ids=IDS).logits
    save_model(model, target.tokenizer, tmp_path / "small")
    again = load_target(ExportOptions(str(tmp_path / "small"), tmp_path), ())
    with torch.no_grad():
        torch.testing.assert_close(again.model(input_ids=IDS).logits, expected)
    assert again.num_layers == 1 and again.model.dtype == torch.float32
    assert again.tokenizer("an area")["input_ids"] == target.tokenizer("an area")["input_ids"]
    assert again.eos_ids == target.eos_ids
