"""The standard dialect on ONNX Runtime's CPU: the contract test, on the fp32 copy and on fp16 as it is.

The copy must answer as the model with the same rounded weights does in fp32. ONNX Runtime has no bf16 kernels on the
CPU, so a bf16 graph must be the fp16 graph, node by node, but for its dtypes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from specrt.engines.contract import LOGITS, STANDARD_DIALECT
from specrt.engines.interface import Array, write_pass
from specrt.exporter.parity.fp32_copy import widen
from specrt.exporter.parity.precision import cast_weights
from tests.exporter.passes.passes_on_ort import Passes
from tests.exporter.tracing.architectures import VOCAB_SIZE, WINDOW, each_row
from tests.exporter.tracing.traces import Traces, W, rounded_model, tiny_spec

PAST = (0, 1, 5, 100)
LENGTH = max(PAST) + W
TOLERANCE = 2e-5  # of the largest logit, in fp32
HALF_TOLERANCE = 3e-2
# The cheapest one that is there in fp16 anyway. Slow: soft caps and windows, and families that overflow in fp16.
BF16_SLOW = ("gemma2-head-of-12", "qwen2", "gemma3")
BF16 = ("llama-rope-llama3", *(pytest.param(name, marks=pytest.mark.slow) for name in BF16_SLOW))


def nodes_of(graph: ir.Model) -> list[tuple[Any, ...]]:
    """What a graph computes, without its dtypes."""
    nodes = []
    for node in graph.graph:
        attributes = {
            name: str(a.as_tensor().numpy().tolist() if a.type == ir.AttributeType.TENSOR else a.value)
            for name, a in node.attributes.items()
            if (node.op_type, name) != ("Cast", "to")
        }
        nodes.append((node.domain, node.op_type, len(node.inputs), sorted(attributes.items())))
    return nodes


class Exported:
    """A tiny model's graph in fp16 and its copy on ONNX Runtime, and torch's logits in fp32."""

    def __init__(self, traces: Traces, name: str, folder: Path, dialect: str = STANDARD_DIALECT) -> None:
        self.name = name
        self.ids = np.random.default_rng(1).integers(3, VOCAB_SIZE, LENGTH)
        with torch.no_grad():
            model = rounded_model(name, torch.float16)
            cast_weights(model, torch.float32)
            tokens = torch.from_numpy(self.ids)[None]
            self.expected: Array = model(input_ids=tokens, use_cache=False).logits[0].numpy()
        self.scale = np.abs(self.expected).max()
        self.spec = tiny_spec(model, "float16", dialect)
        graph = traces.optimized(name, "float16", dialect)
        self.nodes, self.opsets = nodes_of(graph), dict(graph.opset_imports)
        ir.save(graph, folder / "half.onnx", external_data="half.data")
        self.half = Passes(folder / "half.onnx", self.spec, self.ids)
        assert nodes_of(widen(graph)) == self.nodes
        ir.save(graph, folder / "fp32.onnx", external_data="copy.data")
        self.fp32_copy = Passes(folder / "fp32.onnx", replace(self.spec, dtype="float32"), self.ids)


@pytest.fixture(scope="module", params=each_row())
def exported(request: pytest.FixtureRequest, traces: Traces, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return Exported(traces, request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("precision", ["fp32_copy", "half"])
def test_rows_equal_single_rows_equal_no_cache(exported: Exported, precision: str) -> None:
    assert exported.scale > 0.1, "logits this small would hide an error"
    passes: Passes = getattr(exported, precision)
    tolerance = TOLERANCE if precision == "fp32_copy" else HALF_TOLERANCE
    for past in PAST:
        for n in (1, 2, 3, W):
            expected = exported.expected[past : past + n]
            for widths in ([n], [1] * n):
                error = np.abs(passes.logits(past, widths) - expected).max() / exported.scale
                assert error <= tolerance, f"past {past}, passes of {widths}: {error:.2e}"


def test_only_standard_operators(exported: Exported) -> None:
    assert exported.opsets == {"": 24}
    assert {domain for domain, *_ in exported.nodes} == {""}
    operators = [operator for _, operator, *_ in exported.nodes]
    assert operators.count("TensorScatter") == 2 * len(exported.spec.kv_layers)


@pytest.mark.parametrize("exported", BF16, indirect=True)
def test_bf16_graph_is_the_fp16_graph_but_for_dtypes(exported: Exported, traces: Traces) -> None:
    graph = traces.optimized(exported.name, "bfloat16", STANDARD_DIALECT)
    types = [value.type.dtype for value in graph.graph.outputs if value.type is not None]
    assert types == [ir.DataType.FLOAT] + [ir.DataType.BFLOAT16] * 2 * len(exported.spec.kv_layers)
    assert nodes_of(graph) == exported.nodes


def test_stale_slots_are_not_attended_to(traces: Traces, tmp_path: Path) -> None:
    """Rollback is an assignment: what is beyond the positions of a pass, or behind its window, changes nothing."""
    exported = Exported(traces, "mistral", tmp_path)
    binding = exported.fp32_copy.engine.open()
    passes = []
    for stale in (0.0, 1e3):
        for name, buffer in binding.host.items():
            if name.startswith("past_"):
                buffer[:] = stale
        write_pass(binding.host, exported.ids[:30], 0, 1)
        binding.run(30, 1)
        for name, buffer in binding.host.items():
            if name.startswith("past_"):
                buffer[:, :, : 30 - WINDOW + 1] = stale
        write_pass(binding.host, exported.ids[30:32], 30, 2)
        binding.run(2, 2)
        passes.append(binding.host[LOGITS][:2].copy())
    assert np.array_equal(passes[0], passes[1])
