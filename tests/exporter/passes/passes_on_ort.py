"""Passes over a graph on ONNX Runtime, for contract tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specrt.engines.contract import LOGITS, ModelSpec, model_contract
from specrt.engines.interface import Array, write_pass
from specrt.engines.ort.cpu import OrtEngine


class Passes:
    """A graph on ONNX Runtime, and ids to feed it."""

    def __init__(self, graph: Path, spec: ModelSpec, ids: Array) -> None:
        self.engine, self.ids = OrtEngine(graph, model_contract(spec), threads=1), ids

    def logits(self, past: int, widths: list[int]) -> Array:
        """Logits of the passes of ``widths`` after ``past`` tokens that were fed before, all rows kept."""
        binding = self.engine.open()
        try:
            rows, start = [], 0
            for width, kept in ([(past, 1)] if past else []) + [(width, width) for width in widths]:
                write_pass(binding.host, self.ids[start : start + width], start, kept)
                binding.run(width, kept)
                rows.append(binding.host[LOGITS][:kept].copy())
                start += width
            return np.concatenate(rows[bool(past) :])
        finally:
            binding.close()

    def without_cache(self, past: int, rows: int) -> Array:
        """Logits of ``rows`` rows after ``past`` tokens, from one pass over all of them on an empty cache."""
        binding = self.engine.open()
        try:
            write_pass(binding.host, self.ids[: past + rows], 0, rows)
            binding.run(past + rows, rows)
            logits: Array = binding.host[LOGITS][:rows].copy()
            return logits
        finally:
            binding.close()
