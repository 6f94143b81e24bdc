"""Networks as TensorRT-RTX parses them: what the parser changes or drops is found before an engine is built."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import tensorrt_rtx
from onnx import TensorProto, helper

from specrt.engines.contract import WIDTH, Contract, TensorSpec
from specrt.engines.errors import BackendError
from specrt.engines.trt.network import inspect_network, make_logger, parse
from tests.engines.trt.support import stub_versions

NUM_HEADS, CAPACITY, HEAD_DIM = 2, 32, 16
KV_SHAPE = (1, NUM_HEADS, CAPACITY, HEAD_DIM)
QUERY = TensorSpec("query", "float16", (1, NUM_HEADS, WIDTH, HEAD_DIM))
NEW = TensorSpec("new", "float16", (1, NUM_HEADS, WIDTH, HEAD_DIM))
START = TensorSpec("start", "int64", (1,))
SEEN = TensorSpec("seen", "bool", (1, 1, WIDTH, CAPACITY))
LENGTH = TensorSpec("length", "int64", (1,))
PAST = TensorSpec("past", "float16", KV_SHAPE)
PRESENT = TensorSpec("present", "float16", KV_SHAPE, alias="past")
ANSWER = TensorSpec("answer", "float16", (1, NUM_HEADS, WIDTH, HEAD_DIM))
TYPES = {"float16": TensorProto.FLOAT16, "int64": TensorProto.INT64, "bool": TensorProto.BOOL}
SCATTER = helper.make_node("TensorScatter", ["past", "new", "start"], ["present"], axis=2)
MASKED = helper.make_node("Attention", ["query", "present", "present", "seen_mask"], ["answer"])
TO_MASK = helper.make_node("Cast", ["seen"], ["seen_mask"], to=TensorProto.BOOL)
SEEN_IDS = TensorSpec("seen", "int64", (1, 1, WIDTH, CAPACITY))


def _parsed(folder: Path, nodes: list[Any], contract: Contract) -> tuple[Any, list[str], Path]:
    """(network, warnings, graph) of an ONNX graph with the inputs and outputs of ``contract``."""
    inputs, outputs = [
        [helper.make_tensor_value_info(t.name, TYPES[t.dtype], list(t.shape)) for t in tensors]
        for tensors in (contract.inputs, contract.outputs)
    ]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    path = folder / "g.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10), path)
    builder, logger = _builder()
    logger.warnings.clear()
    return parse(tensorrt_rtx, builder, logger, path), logger.warnings, path


@cache
def _builder() -> tuple[Any, Any]:
    """One builder for all networks, and its logger."""
    logger = make_logger(tensorrt_rtx)
    return tensorrt_rtx.Builder(logger), logger


GOOD = Contract((QUERY, NEW, START, SEEN_IDS, PAST), (ANSWER, PRESENT), {})


def _inspect(folder: Path, nodes: list[Any], parsed_as: Contract, contract: Contract | None = None) -> None:
    network, warnings, path = _parsed(folder, nodes, parsed_as)
    inspect_network(tensorrt_rtx, network, contract or parsed_as, warnings, path)


def test_a_masked_attention_on_a_cache_that_is_updated_in_place(tmp_path: Path) -> None:
    _inspect(tmp_path, [SCATTER, TO_MASK, MASKED], GOOD)


def _causal_with_lengths(folder: Path) -> None:
    """The trap: the parser anchors the mask at the upper left and drops the length."""
    attention = helper.make_node(
        "Attention", ["query", "present", "present", "", "", "", "length"], ["answer"], is_causal=1
    )
    _inspect(folder, [SCATTER, attention], Contract((QUERY, NEW, START, PAST, LENGTH), (ANSWER, PRESENT), {}))


def _without_mask(folder: Path) -> None:
    attention = helper.make_node("Attention", ["query", "present", "present"], ["answer"])
    _inspect(folder, [SCATTER, attention], Contract((QUERY, NEW, START, PAST), (ANSWER, PRESENT), {}))


def _copied_cache(folder: Path) -> None:
    """The output is the cache, but not its memory."""
    scatter = helper.make_node("TensorScatter", ["past", "new", "start"], ["updated"], axis=2)
    copy = helper.make_node("Mul", ["updated", "updated"], ["present"])
    _inspect(folder, [scatter, copy, TO_MASK, MASKED], GOOD)


def _unused_input(folder: Path) -> None:
    contract = Contract((*GOOD.inputs, LENGTH), GOOD.outputs, {})
    _inspect(folder, [SCATTER, TO_MASK, MASKED], contract)


def _another_capacity(folder: Path) -> None:
    past = TensorSpec("past", "float16", (1, NUM_HEADS, CAPACITY + 1, HEAD_DIM))
    _inspect(folder, [SCATTER, TO_MASK, MASKED], GOOD, Contract((*GOOD.inputs[:-1], past), GOOD.outputs, {}))


def _another_dtype(folder: Path) -> None:
    past = TensorSpec("past", "bfloat16", KV_SHAPE)
    _inspect(folder, [SCATTER, TO_MASK, MASKED], GOOD, Contract((*GOOD.inputs[:-1], past), GOOD.outputs, {}))


def _missing_output(folder: Path) -> None:
    other = TensorSpec("tokens", "int64", (1,))
    _inspect(folder, [SCATTER, TO_MASK, MASKED], GOOD, Contract(GOOD.inputs, (*GOOD.outputs, other), {}))


FAULTS: list[tuple[Callable[[Path], None], str]] = [
    (_causal_with_lengths, "length|upper left"),
    (_without_mask, "has no mask"),
    (_copied_cache, "present is an in-place update of None, expected past"),
    (_unused_input, "input length is used by no layer|unused input"),
    (_another_capacity, r"input past: got float16\[1, 2, 32, 16\], expected float16\[1, 2, 33, 16\]"),
    (_another_dtype, r"input past: got float16\[.*\], expected bfloat16"),
    (_missing_output, "output tokens is gone"),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS, ids=[fault.__name__.strip("_") for fault, _ in FAULTS])
def test_what_the_parser_lost_is_an_error(fault: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=f"(?i){message}") as error:
        fault(tmp_path)
    assert "\n" not in str(error.value)


def stub_network(trt: Any, **of: Any) -> Any:
    """The network of ``GOOD`` as version ``trt`` would hand it out; ``of`` are properties of its attention."""
    names = {"float16": "HALF", "int64": "INT64"}
    inputs, outputs = (
        [
            SimpleNamespace(
                name=t.name,
                dtype=SimpleNamespace(name=names[t.dtype]),
                shape=tuple(-1 if isinstance(dim, str) else dim for dim in t.shape),
            )
            for t in tensors
        ]
        for tensors in (GOOD.inputs, GOOD.outputs)
    )
    layers = [
        stub_versions.Layer(trt.LayerType.KV_CACHE_UPDATE, ["past", "new", "start"], "present"),
        stub_versions.Layer(trt.LayerType.SHUFFLE, ["seen"], "seen_mask"),
        stub_versions.Layer(trt.LayerType.ATTENTION_INPUT, ["query", "present"], "answer", **of),
    ]
    return stub_versions.Network(inputs, outputs, layers)


KINDS = stub_versions.CausalMaskKind


@pytest.mark.parametrize(
    ("version", "of", "problem"),
    [
        ("10.16.1", {"mask": 1, "causal": False}, None),
        ("10.16.1", {"mask": 1, "causal": True}, "causal by itself"),
        ("10.16.1", {"mask": None, "causal": False}, "has no mask"),
        ("11.0.0", {"mask": 1, "causal": False, "causal_kind": KINDS.NONE}, None),
        ("11.0.0", {"mask": 1, "causal": False, "causal_kind": KINDS.UPPER_LEFT}, "causal by itself"),
        ("11.0.0", {"mask": None, "causal": False, "causal_kind": KINDS.LOWER_RIGHT}, "has no mask"),
    ],
)
def test_attention_is_inspected_by_what_a_version_has(version: str, of: dict[str, Any], problem: str | None) -> None:
    """``causal_kind`` is TensorRT 11's; 10.15 and 10.16 have ``causal`` alone."""
    trt = stub_versions.module(version)
    network = stub_network(trt, **of)
    if problem is None:
        inspect_network(trt, network, GOOD, [], Path("g.onnx"))
    else:
        with pytest.raises(BackendError, match=problem):
            inspect_network(trt, network, GOOD, [], Path("g.onnx"))


def test_an_operator_that_tensorrt_refuses_is_named(tmp_path: Path) -> None:
    softcap = helper.make_node("Attention", ["query", "present", "present", "seen_mask"], ["answer"], softcap=5.0)
    with pytest.raises(BackendError, match=r"tensorrt_rtx .* cannot read it \(Attention: .*softcap"):
        _inspect(tmp_path, [SCATTER, TO_MASK, softcap], GOOD)
