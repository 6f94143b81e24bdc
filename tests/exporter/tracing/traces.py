"""Graphs of tiny models as they are traced, each made once for all workers of a test run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from specrt.engines.contract import ONNXRUNTIME_DIALECT, ModelSpec
from specrt.exporter.parity.precision import cast_weights
from specrt.exporter.passes import optimize
from specrt.exporter.tracing.observe import observe
from specrt.exporter.tracing.trace import trace
from tests.exporter.tracing.architectures import VOCAB_SIZE, tiny_model
from tests.exports import Exports, digest, made_once

W = 9  # rows of the widest round
MAX_SEQ_LEN = 200
OVERRIDES: dict[str, dict[str, Any]] = {
    "granite": {"residual_multiplier": 0.75},  # a number of fp16: in the graph it is a constant of that type
}


def rounded_model(name: str, dtype: torch.dtype) -> Any:
    """A tiny model with weights in ``dtype``; buffers, such as rope frequencies, stay in fp32, as when it is loaded."""
    model = tiny_model(name, **OVERRIDES.get(name, {}))
    cast_weights(model, dtype)
    return model


def tiny_spec(model: Any, dtype: str = "float32", dialect: str = ONNXRUNTIME_DIALECT) -> ModelSpec:
    """Context 200, chunks of 120, W rows."""
    layers = observe(model.config).kv_layers
    return ModelSpec(VOCAB_SIZE, MAX_SEQ_LEN, MAX_SEQ_LEN + W - 1, 120, W, dtype, layers, dialect)


class Traces:
    """Graphs of ``tiny_model`` in fp32, and of ``rounded_model`` in other dtypes, with ``tiny_spec``."""

    def __init__(self, exports: Exports) -> None:
        self._folder = exports.folder / "traces"

    def raw(self, name: str, dtype: str = "float32", dialect: str = ONNXRUNTIME_DIALECT) -> ir.Model:
        """The graph before any pass; the caller may change it."""

        def make() -> ir.Model:
            model = tiny_model(name) if dtype == "float32" else rounded_model(name, getattr(torch, dtype))
            return trace(model, tiny_spec(model, dtype, dialect))

        return self._loaded(digest(name, dtype, dialect), make)

    def optimized(self, name: str, dtype: str = "float32", dialect: str = ONNXRUNTIME_DIALECT) -> ir.Model:
        """The graph after all passes; the caller may change it."""

        def make() -> ir.Model:
            return optimize(self.raw(name, dtype, dialect), tiny_spec(tiny_model(name), dtype, dialect))

        return self._loaded(digest(name, dtype, dialect, "optimized"), make)

    def _loaded(self, key: str, make: Callable[[], ir.Model]) -> ir.Model:
        def save(folder: Path) -> None:
            folder.mkdir()
            ir.save(make(), folder / "model.onnx", external_data="data", size_threshold_bytes=4096)

        return ir.load(made_once(self._folder / key, save) / "model.onnx")
