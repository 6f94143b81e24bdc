"""The contract of every exported graph: n rows in one pass == n passes of one row == the model without a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from specrt.engines.contract import LOGITS, model_contract
from specrt.engines.interface import Array, write_pass
from specrt.engines.ort.cpu import OrtEngine
from tests.exporter.tracing.architectures import VOCAB_SIZE, each_row, tiny_model
from tests.exporter.tracing.traces import Traces, W, tiny_spec

PAST = (0, 1, 5, 100)
LENGTH = max(PAST) + W
TOLERANCE = 2e-5  # of the largest logit; the prototype measured at most 5e-6


class Exported:
    """A tiny model, its graph on ONNX Runtime, and the ids both are fed."""

    def __init__(self, traces: Traces, name: str, folder: Path) -> None:
        self.model = tiny_model(name)
        self.ids = np.random.default_rng(1).integers(3, VOCAB_SIZE, LENGTH)
        self.expected = self._reference()
        self.spec = tiny_spec(self.model)
        self.graph = traces.optimized(name)
        ir.save(self.graph, folder / "model.onnx", external_data="model.onnx.data")
        self.engine = OrtEngine(folder / "model.onnx", model_contract(self.spec), threads=1)

    def _reference(self) -> Array:
        """Logits [N, V] without a cache. Longrope picks its factors by length, so all of it is passed at once."""
        with torch.no_grad():
            logits: Array = self.model(input_ids=torch.from_numpy(self.ids)[None], use_cache=False).logits[0].numpy()
        return logits

    def logits(self, past: int, widths: list[int]) -> Array:
        """Logits of the passes of ``widths`` after ``past`` tokens that were fed before, all rows kept."""
        binding = self.engine.open()
        try:
            if past:
                self._feed(binding, 0, past, 1)
            rows, start = [], past
            for width in widths:
                rows.append(self._feed(binding, start, width, width))
                start += width
            return np.concatenate(rows)
        finally:
            binding.close()

    def _feed(self, binding: Any, start: int, width: int, rows: int) -> Array:
        host = binding.host
        write_pass(host, self.ids[start : start + width], start, rows)
        binding.run(width, rows)
        copy: Array = host[LOGITS][:rows].copy()
        return copy


@pytest.fixture(scope="module", params=each_row())
def exported(request: pytest.FixtureRequest, traces: Traces, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return Exported(traces, request.param, tmp_path_factory.mktemp(request.param))


def test_rows_equal_single_rows_equal_no_cache(exported: Exported) -> None:
    scale = np.abs(exported.expected).max()
    assert scale > 0.1, "logits this small would hide an error"
    for past in PAST:
        for n in (1, 2, 3, W):
            together = exported.logits(past, [n])
            single = exported.logits(past, [1] * n)
            expected = exported.expected[past : past + n]
            for name, got in (("one pass", together), ("single rows", single)):
                error = np.abs(got - expected).max() / scale
                assert error <= TOLERANCE, f"past {past}, {n} rows, {name}: {error:.2e}"


def test_pass_that_grows_over_window_and_rope_edges(exported: Exported) -> None:
    """Passes of W rows from the start, over every edge (window 16, original rope length 64)."""
    widths = [W] * (LENGTH // W)
    got = exported.logits(0, widths)
    error = np.abs(got - exported.expected[: len(got)]).max() / np.abs(exported.expected).max()
    assert error <= TOLERANCE


def test_one_attention_node_a_layer_and_kv_aliases(exported: Exported) -> None:
    nodes = [node for node in exported.graph.graph if node.op_type == "GroupQueryAttention"]
    assert len(nodes) == len(exported.spec.kv_layers)
    assert [value.name for value in exported.graph.graph.inputs] == [
        tensor.name for tensor in model_contract(exported.spec).inputs
    ]
