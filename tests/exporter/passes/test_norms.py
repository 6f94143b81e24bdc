"""Norms of fp16 models whose weights multiply in fp32, as ONNX Runtime's kernels take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from specrt.exporter.parity.precision import cast_weights
from tests.exporter.passes.passes_on_ort import Passes
from tests.exporter.tracing.architectures import ROWS, VOCAB_SIZE
from tests.exporter.tracing.traces import Traces, rounded_model, tiny_spec

NORMS = ("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization")
# A norm in fp32, and the usual one.
QUICK = ("gemma2", "llama")
LENGTH, HALF_TOLERANCE = 24, 3e-2


def mixed(graph: ir.Model) -> list[list[str]]:
    """The dtypes of each norm whose inputs differ in them."""
    found = [[str(value.dtype) for value in n.inputs if value is not None] for n in graph.graph if n.op_type in NORMS]
    return [dtypes for dtypes in found if len(set(dtypes)) > 1]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ROWS])
def test_onnx_runtime_runs_every_architecture_in_fp16(name: str, traces: Traces, tmp_path: Path) -> None:
    graph = traces.optimized(name, "float16")
    assert mixed(graph) == []
    ir.save(graph, tmp_path / "half.onnx", external_data="half.data")
    ids = np.random.default_rng(1).integers(3, VOCAB_SIZE, LENGTH)
    model: Any = rounded_model(name, torch.float16)
    spec = tiny_spec(model, "float16")
    cast_weights(model, torch.float32)
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()
    passes = Passes(tmp_path / "half.onnx", spec, ids)
    for past, widths in ((0, [9]), (10, [4, 1, 5])):
        rows = expected[past : past + sum(widths)]
        error = np.abs(passes.logits(past, widths) - rows).max() / np.abs(expected).max()
        assert error <= HALF_TOLERANCE, f"past {past}: {error:.2e}"


def test_a_norm_in_fp32_keeps_its_addition_and_the_usual_one_takes_it(traces: Traces) -> None:
    """Of a residual stream in fp16: a fused addition would add in the norm's dtype."""
    counts = {}
    for name in QUICK:
        operators = [node.op_type for node in traces.optimized(name, "float16").graph]
        counts[name] = [operators.count(norm) for norm in NORMS]
    assert counts == {"gemma2": [9, 0], "llama": [1, 4]}
