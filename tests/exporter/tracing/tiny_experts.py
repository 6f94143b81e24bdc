"""Graphs of tiny mixtures of experts, and their logits on ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from specrt.engines.contract import ONNXRUNTIME_DIALECT, ModelSpec
from specrt.engines.interface import Array
from specrt.exporter.passes import optimize
from specrt.exporter.tracing.observe import observe
from specrt.exporter.tracing.trace import trace
from tests.exporter.passes.passes_on_ort import Passes
from tests.exporter.tracing.architectures import VOCAB_SIZE, tiny_model

NUM_IDS, W = 24, 9
IDS = np.random.default_rng(1).integers(3, VOCAB_SIZE, NUM_IDS)


def spec_of(model: Any, dialect: str = ONNXRUNTIME_DIALECT, dtype: str = "float32") -> ModelSpec:
    return ModelSpec(VOCAB_SIZE, 64, 72, 32, W, dtype, observe(model.config).kv_layers, dialect)


class Mixture:
    """A tiny model, its logits [N, V] over ``IDS``, and its graph."""

    def __init__(self, name: str, dialect: str = ONNXRUNTIME_DIALECT, **overrides: Any) -> None:
        self.model = tiny_model(name, **overrides)
        self.spec = spec_of(self.model, dialect)
        with torch.no_grad():
            self.expected: Array = self.model(input_ids=torch.from_numpy(IDS)[None], use_cache=False).logits[0].numpy()
        self.graph = optimize(trace(self.model, self.spec), self.spec)

    def error(self, graph: ir.Model, folder: Path) -> float:
        """The largest difference to the model's logits, over the largest logit: passes of W, 1 and 2 rows."""
        got = passes_of(graph, self.spec, folder).logits(0, [W, 1, 2, 1])
        return float(np.abs(got - self.expected[: len(got)]).max() / np.abs(self.expected).max())


def passes_of(graph: ir.Model, spec: ModelSpec, folder: Path) -> Passes:
    ir.save(graph, folder / "model.onnx", external_data="model.onnx.data")
    return Passes(folder / "model.onnx", spec, IDS)


def node_of(graph: ir.Model, op_type: str) -> ir.Node:
    """The last node of a type."""
    return [node for node in graph.graph if node.op_type == op_type][-1]


def replace_stored(value: ir.Value | None, array: Array) -> None:
    """Let an initializer hold ``array``."""
    assert value is not None
    value.const_value = ir.tensor(np.ascontiguousarray(array), name=value.name)


def stored(value: ir.Value | None) -> Array:
    assert value is not None and value.const_value is not None
    array: Array = value.const_value.numpy()
    return array
