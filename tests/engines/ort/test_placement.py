"""On ONNX Runtime's CUDA provider no node of a bundle is computed on the host, by the provider's own rule."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from specrt.engines.fake import fake_spec
from specrt.engines.samplers import SAMPLER_NAMES
from specrt.exporter.samplers import sampler_graph
from tests.engines.ort.placement import nodes_on_host, placed_nodes
from tests.exports import Exports


@pytest.mark.parametrize("name", SAMPLER_NAMES)
def test_samplers_read_no_shapes(name: str) -> None:
    """With one node on the host the strict session fails, and each round has copies and a wait."""
    for vocab_size, target in ((320, 320), (1500, 900), (2053, 2053)):
        model = sampler_graph(name, fake_spec(vocab_size), target)
        assert nodes_on_host(model) == []
        assert [node.name for node in model.graph.node if node.op_type in ("Shape", "Size")] == []


def test_models_of_a_bundle(tiny_bundle: Path) -> None:
    graphs = sorted(tiny_bundle.glob("*/model.onnx"))
    assert graphs
    for path in graphs:
        assert nodes_on_host(onnx.load(path, load_external_data=False)) == [], path


CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


@pytest.mark.parametrize("provider", [CPU, pytest.param(CUDA, marks=pytest.mark.gpu)])
def test_every_node_is_where_it_was_asked_for(
    provider: str, exports: Exports, capfd: pytest.CaptureFixture[str]
) -> None:
    """By ONNX Runtime's own log. What CUDA does not take would be on the CPU, which is always there."""
    if provider not in ort.get_available_providers():
        pytest.skip(f"this onnxruntime has no {provider}")
    options = {"max_seq_len": 96, "prefill_chunk": 32, "dtype": "fp16"}
    bundle = exports.bundle(exports.model(), "self", 3, **options)
    graphs = sorted(bundle.rglob("*.onnx"))
    assert len(graphs) > len(SAMPLER_NAMES)
    for path in graphs:
        assert list(placed_nodes(path, list(dict.fromkeys([provider, CPU])), capfd)) == [provider], path


def test_integers_that_follow_from_a_shape_go_to_the_host() -> None:
    """The control: the last row's number as it was computed once, and a slice up to it."""
    nodes = [
        helper.make_node("Shape", ["drafted"], ["rows"], name="shape"),
        helper.make_node("Sub", ["rows", "one"], ["last"], name="sub"),
        helper.make_node("Slice", ["drafted", "one", "last", "zero"], ["kept"], name="slice"),
        helper.make_node("Expand", ["kept", "rows"], ["out"], name="expand"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("drafted", TensorProto.INT64, ["R"])],
        [helper.make_tensor_value_info("out", TensorProto.INT64, None)],
        [helper.make_tensor(name, TensorProto.INT64, [1], [value]) for name, value in (("one", 1), ("zero", 0))],
    )
    found = nodes_on_host(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))
    assert found == ["Sub sub"], "Slice and Expand read a shape on the host, as their kernels want it"
