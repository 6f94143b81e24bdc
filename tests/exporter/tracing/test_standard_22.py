"""The dialect for TensorRT before 10.15: operators of its parser, and a cache in two buffers that change places."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from specrt.engines.contract import LOGITS, STANDARD_22_DIALECT, ModelSpec, model_contract
from specrt.engines.ort.cpu import OrtEngine
from specrt.engines.samplers import SAMPLER_NAMES
from specrt.engines.trt.profiles import profiles_of
from specrt.exporter.quantization.qdq import dequantize_weights
from specrt.exporter.samplers import write_samplers
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


def test_what_the_parser_lacks_is_noticed(traces: Traces) -> None:
    """The record refuses the dialect of later versions, integers that are summed, and a scatter that adds."""
    later = ir.to_proto(traces.optimized("llama", "float16", "standard"))
    assert {"opset  24", "::TensorScatter", "::Attention"} <= set(objections(later))
    ints = [helper.make_tensor_value_info("x", TensorProto.INT64, ["n"])]
    nodes = [helper.make_node("CumSum", ["x", "axis"], ["y"])]
    axis = helper.make_tensor("axis", TensorProto.INT64, [], [0])
    made = helper.make_graph(nodes, "g", ints, [helper.make_tensor_value_info("y", TensorProto.INT64, ["n"])], [axis])
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)])
    assert list(objections(model)) == ["CumSum of INT64"]


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
