"""The dialect for TensorRT before 10.15: operators of its parser, and a cache in two buffers that change places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from specrt.engines.contract import LOGITS, STANDARD_22_DIALECT, ModelSpec, model_contract
from specrt.engines.fake import fake_spec
from specrt.engines.ort.cpu import OrtEngine
from specrt.engines.samplers import SAMPLER_NAMES
from specrt.engines.trt.profiles import profiles_of
from specrt.exporter.quantization.qdq import dequantize_weights
from specrt.exporter.samplers import sampler_graph, write_samplers
from specrt.runtime.model import KVCachedModel
from specrt.tools.lab.engine_layers import engine_layers
from tests.exporter.tracing.architectures import VOCAB_SIZE, tiny_model
from tests.exporter.tracing.tensorrt_10_3 import objections
from tests.exporter.tracing.test_standard import PAST, TOLERANCE, Exported
from tests.exporter.tracing.traces import Traces, W, tiny_spec

QUICK = ("llama", "gemma2-head-of-12")  # the latter has a soft cap, windows, and heads that are padded
SLOW = ("qwen3", "mistral", "llama-head-of-320", "phi3-longrope", "gpt2-head-of-25")
ROWS = (*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW))


@pytest.fixture(scope="module", params=ROWS)
def exported(request: pytest.FixtureRequest, traces: Traces, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return Exported(traces, request.param, tmp_path_factory.mktemp(request.param), STANDARD_22_DIALECT)


def test_rows_equal_single_rows_equal_no_cache(exported: Exported) -> None:
    """Of one, two and many passes: what an odd number of them wrote is read as what an even number wrote."""
    passes = exported.fp32_copy
    for past in PAST:
        for n in (1, 2, 3, W):
            expected = exported.expected[past : past + n]
            for widths in ([n], [1] * n):
                error = np.abs(passes.logits(past, widths) - expected).max() / exported.scale
                assert error <= TOLERANCE, f"past {past}, passes of {widths}: {error:.2e}"


def test_what_is_rolled_back_changes_nothing(exported: Exported) -> None:
    """Both buffers hold what was there; a prefix is found again, in passes of one and of two tokens."""
    spec, ids = exported.fp32_copy.engine, exported.ids.tolist()
    for min_width in (1, 2):
        model = KVCachedModel(spec, exported.spec)
        model.min_width = min_width
        model.feed(ids[:40], 1)
        for wrong in ([5, 6, 7], [8]):
            model.feed(wrong, 1)
            model.rollback(40)
        assert model.reusable([*ids[:40], 1], min_width) == 40
        for start in (40, 41, 43):
            width, _ = model.feed(ids[start : start + 2], 2)
            (logits,) = model.read(LOGITS)
            error = np.abs(logits[:2] - exported.expected[start : start + 2]).max() / exported.scale
            assert width == 2 and error <= TOLERANCE
            model.rollback(start + 1 if start == 40 else start + 2)
        assert model.kv_memory() == {}, "it has no fixed place that a draft could share"
        model.close()


def test_the_parser_of_10_3_takes_all_of_it(exported: Exported, traces: Traces, tmp_path: Path) -> None:
    """And TensorRT-RTX's own parser and builder: no KV cache update, and no attention, is in their network."""
    graph = traces.optimized(exported.name, "float16", STANDARD_22_DIALECT)
    for name in ("plain", "int8"):
        if name == "int8":
            dequantize_weights(graph, name, VOCAB_SIZE)
        ir.save(graph, tmp_path / f"{name}.onnx", external_data=f"{name}.data")
        assert list(objections(onnx.load(tmp_path / f"{name}.onnx", load_external_data=False))) == []
    contract = model_contract(exported.spec)
    found = engine_layers(tmp_path / "plain.onnx", contract, profiles_of(contract))
    assert not any("mha" in layer.name for layer in found.layers["verify"])


@pytest.mark.parametrize("vocab_size", [320, 151_936])
def test_the_parser_of_10_3_takes_all_samplers(vocab_size: int, tmp_path: Path) -> None:
    spec = ModelSpec(vocab_size, 64, 70, 32, 7, "float16", (), STANDARD_22_DIALECT)
    written = write_samplers(tmp_path, "samplers", spec, vocab_size)
    assert written.keys() == set(SAMPLER_NAMES)
    assert {name: list(objections(onnx.load(tmp_path / file))) for name, file in written.items()} == {
        name: [] for name in written
    }


def one_node(operator: str, kind: int, *constants: onnx.TensorProto, **attributes: Any) -> onnx.ModelProto:
    x, y = (helper.make_tensor_value_info(name, kind, ["n", 4]) for name in "xy")
    node = helper.make_node(operator, ["x", *(tensor.name for tensor in constants)], ["y"], **attributes)
    graph = helper.make_graph([node], "g", [x], [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


def ints(name: str, *shape: int) -> onnx.TensorProto:
    return helper.make_tensor(name, TensorProto.INT64, shape, [0] * int(np.prod(shape)))


LACKING = {
    "::CumSum": one_node("CumSum", TensorProto.FLOAT, ints("axis")),
    "Tanh of INT64": one_node("Tanh", TensorProto.INT64),
    "Mod of FLOAT": one_node("Mod", TensorProto.FLOAT, ints("by", 1)),
    "ScatterND with reduction": one_node(
        "ScatterND", TensorProto.FLOAT, ints("indices", 1, 1), ints("updates", 1, 4), reduction="add"
    ),
    "ReduceMax whose input 1 is not a constant": helper.make_model(
        helper.make_graph(
            [helper.make_node("ReduceMax", ["x", "axes"], ["y"])],
            "g",
            [helper.make_tensor_value_info(name, TensorProto.INT64, ["n"]) for name in ("x", "axes")],
            [helper.make_tensor_value_info("y", TensorProto.INT64, None)],
        ),
        opset_imports=[helper.make_opsetid("", 18)],
    ),
}


@pytest.mark.parametrize("objection", LACKING)
def test_what_the_parser_lacks_is_noticed(objection: str) -> None:
    """The record refuses sums by a loop, types, attributes, and axes that a graph computes."""
    assert list(objections(LACKING[objection])) == [objection]


def test_the_dialect_of_later_versions_is_refused(traces: Traces) -> None:
    later = ir.to_proto(traces.optimized("llama", "float16", "standard"))
    assert {"opset  24", "::TensorScatter", "::Attention"} <= set(objections(later))
    samplers = {name: sampler_graph(name, fake_spec(1500), 1500) for name in SAMPLER_NAMES}
    assert {name for name, graph in samplers.items() if "::CumSum" in objections(graph)} == {
        *("filter", "filter-wide", "nucleus", "match-sampled", "block")
    }


def test_the_second_buffers_are_planned_and_swapped(exported: Exported) -> None:
    spec = tiny_spec(tiny_model(exported.name), "float16", STANDARD_22_DIALECT)
    contract = model_contract(spec)
    assert len(contract.swaps) == 2 * len(spec.kv_layers)
    engine = exported.fp32_copy.engine
    assert isinstance(engine, OrtEngine)
    binding = engine.open()
    places = {name: memory.ctypes.data for name, memory in binding.host.items() if "key.0" in name}
    binding.run(1, 1)
    swapped = {name: memory.ctypes.data for name, memory in binding.host.items() if "key.0" in name}
    assert swapped == dict(zip(places, reversed(places.values()), strict=True)) and len(set(places.values())) == 2
    binding.close()
