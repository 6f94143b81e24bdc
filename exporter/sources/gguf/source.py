"""A GGUF file as a source: its config and tokenizer, read without transformers, and a fix for what its loader omits.

transformers parses the whole file, which takes seconds, for each of config, tokenizer and weights, and uses a
tokenizer.json that happens to be next to the file. Here only the file itself is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specrt.exporter.sources.gguf.file import read_gguf
from specrt.exporter.sources.gguf.general import sampling_of
from specrt.exporter.sources.gguf.metadata import config_from_gguf
from specrt.exporter.sources.gguf.tokens import tokenizer_from_gguf


@dataclass(frozen=True)
class GgufSource:
    """The model in the file at ``path``. Every method raises ``SpecrtError`` with one line."""

    path: Path

    def config(self) -> Any:
        """The transformers config of its metadata."""
        return config_from_gguf(read_gguf(self.path))

    def tokenizer(self) -> Any:
        """The fast transformers tokenizer of its metadata."""
        return tokenizer_from_gguf(read_gguf(self.path))

    def generation_config(self) -> Any:
        """Its recommended sampling settings as attributes, or None."""
        return sampling_of(read_gguf(self.path))

    def license(self) -> dict[str, bytes]:
        """The licence fields of its metadata as a file by name; empty when there are none."""
        metadata = read_gguf(self.path).metadata
        lines = [f"{key}: {metadata[key]}" for key in sorted(metadata) if key.startswith("general.license")]
        text = "\n".join([f"Licence as named in the metadata of {self.path.name}:", *lines]) + "\n"
        return {"LICENSE.txt": text.encode()} if lines else {}

    def restore_order(self, model: Any) -> None:
        """Put the rows of a llama file's queries and keys in transformers' order, where its loader did not.

        Files of this architecture hold the two halves of a rotated head interleaved. The loader undoes it, except when
        ``attention.head_count_kv`` is absent, as in files with as many KV heads as heads.
        """
        gguf = read_gguf(self.path)
        if gguf.architecture != "llama" or "llama.attention.head_count_kv" in gguf.metadata:
            return
        heads = model.config.num_attention_heads
        for name, parameter in model.named_parameters():
            if ".q_proj." in name or ".k_proj." in name:
                parameter.data = _halves(parameter.data, heads)


def gguf_in(location: str, options: dict[str, Any]) -> GgufSource | None:
    """The GGUF source of a folder and options of ``from_pretrained``, or None when these name no GGUF file."""
    return GgufSource(Path(location) / options["gguf_file"]) if "gguf_file" in options else None


def _halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows [heads * d, ...] of which each head's come in pairs (i, i + d / 2): first halves, then second halves."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])  # [heads, d / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(rows.shape).contiguous()
