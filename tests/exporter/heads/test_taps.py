"""The hidden states that a target's graph writes are those of the torch model, whichever way it is traced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from specrt.engines.contract import FEATURES, ONNXRUNTIME_DIALECT, STANDARD_DIALECT
from specrt.exporter.heads.taps import tapped_states
from specrt.exporter.options import ExportOptions
from specrt.exporter.parity.reference import feature_error, graph_outputs
from specrt.exporter.passes import optimize
from specrt.exporter.planning import plan_model
from specrt.exporter.quantization.blocks import quantize_weights
from specrt.exporter.sources.source import find_source
from specrt.exporter.tracing.trace import trace, trace_whole
from tests.exporter.tracing.architectures import VOCAB_SIZE, tiny_model
from tests.exporter.tracing.traces import tiny_spec
from tests.exports import Exports

IDS = np.random.default_rng(4).integers(3, VOCAB_SIZE, 40)


def features_of(model: Any, taps: tuple[int, ...], folder: Path, whole: bool, dialect: str) -> np.ndarray:
    """Features of the optimized graph over ``IDS``, in passes of several widths."""
    spec = replace(tiny_spec(model, dialect=dialect), feature_size=len(taps) * model.config.hidden_size)
    graph = optimize((trace_whole if whole else trace)(model, spec, taps), spec)
    ir.save(graph, folder / "model.onnx", external_data="model.onnx.data")
    return graph_outputs(folder / "model.onnx", spec, IDS, threads=1)[FEATURES]


@pytest.mark.parametrize(
    ("name", "whole", "dialect"),
    [
        ("llama", False, ONNXRUNTIME_DIALECT),
        pytest.param("llama", False, STANDARD_DIALECT, marks=pytest.mark.slow),
        pytest.param("llama", True, ONNXRUNTIME_DIALECT, marks=pytest.mark.slow),
        pytest.param("gemma2", False, ONNXRUNTIME_DIALECT, marks=pytest.mark.slow),
        pytest.param("granite", False, STANDARD_DIALECT, marks=pytest.mark.slow),
    ],
)
def test_hidden_states_of_a_graph_are_those_of_transformers(
    name: str, whole: bool, dialect: str, tmp_path: Path
) -> None:
    """The last one is taken before the final norm, which transformers applies."""
    model = tiny_model(name, num_hidden_layers=4)
    taps = (0, 2, 3, 4)
    last: list[torch.Tensor] = []
    layers = model.model.layers
    hook = layers[-1].register_forward_hook(
        lambda module, inputs, output: last.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.no_grad():
        model.set_attn_implementation("eager")
        states = model(torch.from_numpy(IDS)[None], output_hidden_states=True, use_cache=False).hidden_states
    hook.remove()
    expected = torch.cat([states[0], states[2], states[3], last[0].reshape(states[3].shape)], dim=-1)[0].numpy()
    torch.testing.assert_close(tapped_states(model, IDS, taps).numpy(), expected)
    assert feature_error(features_of(model, taps, tmp_path, whole, dialect), expected) < 1e-5


@pytest.mark.slow
def test_features_stay_an_output_of_quantized_weights(tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    spec = replace(tiny_spec(model), feature_size=2 * 64)
    graph = quantize_weights(optimize(trace(model, spec, (1, 3)), spec), "int8", VOCAB_SIZE)
    ir.save(graph, tmp_path / "model.onnx", external_data="model.onnx.data")
    found = graph_outputs(tmp_path / "model.onnx", spec, IDS, threads=1, prepack=True)[FEATURES]
    model.set_attn_implementation("eager")
    assert 0 < feature_error(found, tapped_states(model, IDS, (1, 3)).numpy()) < 0.05


def test_a_plan_of_hidden_states_has_no_draft(exports: Exports, tmp_path: Path) -> None:
    source = find_source(str(exports.model()))
    plan = plan_model("target", source, ExportOptions("target", tmp_path, feature_taps=(0, 2)))
    assert plan.spec.feature_size == 2 * 64 and plan.taps == (0, 2) and not plan.spec.reads_features
