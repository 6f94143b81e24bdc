"""A tiny target and its draft, and their export with the defaults of these tests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from specrt.engines.manifest import Manifest, ModelEntry
from specrt.engines.ort.cpu import OrtEngine
from specrt.engines.samplers import sampler_contract
from specrt.exporter.export import export
from specrt.exporter.options import ExportOptions
from tests.tiny import save_tiny_model

K = 4
MAX_SEQ_LEN = 96
CHUNK = 16


def set_generation_config(folder: Path, **changes: Any) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def save_models(root: Path) -> None:
    """A tiny ``target`` and a smaller ``draft`` for it."""
    target = save_tiny_model(root / "target")
    (target / "LICENSE").write_text("a licence\n")
    set_generation_config(target, do_sample=True, temperature=0.6, top_k=20)
    save_tiny_model(root / "draft", num_hidden_layers=1, hidden_size=32, max_position_embeddings=64)


def export_tiny(models: dict[str, Path], output: Path, **changes: Any) -> Manifest:
    options = {"target": str(models["target"]), "num_speculative_tokens": K, "max_seq_len": MAX_SEQ_LEN, **changes}
    return export(ExportOptions(output=output, prefill_chunk=CHUNK, **options))


def load_samplers(bundle: Path, entry: ModelEntry, vocab_size: int) -> None:
    """Every sampler of ``entry`` honours its contract, for one row as for all."""
    for name, path in entry.samplers.items():
        for max_rows in (1, entry.spec.max_rows):
            OrtEngine(
                bundle / path, sampler_contract(name, replace(entry.spec, max_rows=max_rows), vocab_size), threads=1
            )
