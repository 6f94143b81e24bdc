"""Attention without a fused kernel, and engines that allocate nothing, by TensorRT-RTX's own builder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import tensorrt_rtx
from onnx import TensorProto, helper

from specrt.engines.contract import WIDTH, Contract, TensorSpec
from specrt.engines.errors import BackendError
from specrt.engines.manifest import Manifest
from specrt.engines.trt.build import _Builder, _Job
from specrt.engines.trt.profiles import Profile
from tests.progress import KeptProgress

UNFUSED, FUSED = 512, 64  # head sizes, in fp16
PROFILES: dict[str, Profile] = {"verify": {WIDTH: (1, 4, 4)}}


def job(folder: Path, head_size: int) -> _Job:
    """One attention under a mask that is fed, in the place of a whole model."""
    shape = (1, 2, WIDTH, head_size)
    inputs = (TensorSpec("query", "float16", shape), TensorSpec("key", "float16", (1, 2, 32, head_size)))
    contract = Contract(
        (*inputs, TensorSpec("seen", "int64", (1, 1, WIDTH, 32))), (TensorSpec("answer", "float16", shape),), {}
    )
    kinds = {"float16": TensorProto.FLOAT16, "int64": TensorProto.INT64}
    infos = [
        [helper.make_tensor_value_info(t.name, kinds[t.dtype], list(t.shape)) for t in tensors]
        for tensors in (contract.inputs, contract.outputs)
    ]
    nodes = [
        helper.make_node("Cast", ["seen"], ["mask"], to=TensorProto.BOOL),
        helper.make_node("Attention", ["query", "key", "key", "mask"], ["answer"]),
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "g", infos[0], infos[1]), opset_imports=[helper.make_opsetid("", 24)], ir_version=10
    )
    onnx.save(model, folder / "g.onnx")
    return _Job("target", "g.onnx", (), contract, "float16", PROFILES)


@pytest.fixture
def manifest() -> Any:
    class Files:
        def __init__(self) -> None:
            self.files: dict[str, Any] = {}

    return Files()


def built(folder: Path, head_size: int, manifest: Manifest) -> tuple[int, list[str]]:
    """(bytes of the engine, what was noted)."""
    steps = KeptProgress()
    builder = _Builder(tensorrt_rtx, ["8.9"], folder, has_timings=False)
    entry = builder.build(job(folder, head_size), folder, folder, manifest, steps)
    return entry.num_bytes, steps.notes


def test_attention_without_a_fused_kernel_is_built_from_single_operators(tmp_path: Path, manifest: Any) -> None:
    """TensorRT-RTX 1.7.1 fuses no head of 512 values, and refuses it unless it may decompose the attention."""
    size, notes = built(tmp_path, UNFUSED, manifest)
    assert size > 1000
    assert len(notes) == 1 and "target: tensorrt_rtx" in notes[0] and "no fused kernel for its attention" in notes[0]


def test_attention_with_a_fused_kernel_stays_fused(tmp_path: Path, manifest: Any) -> None:
    assert built(tmp_path, FUSED, manifest)[1] == []


def test_what_cannot_be_built_either_way_is_one_line(
    tmp_path: Path, manifest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specrt.engines.trt.build.allow_decomposition", lambda trt, network: False)
    with pytest.raises(BackendError, match=r"cannot be|cannot build it \(.*decompos.*report this model") as error:
        built(tmp_path, UNFUSED, manifest)
    assert "\n" not in str(error.value)


def test_engines_work_in_the_memory_that_they_are_given(
    tmp_path: Path, manifest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flag is set on every configuration."""
    seen = []
    build = tensorrt_rtx.Builder.build_serialized_network

    def noted(self: Any, network: Any, config: Any) -> Any:
        seen.append(config.get_flag(tensorrt_rtx.BuilderFlag.REQUIRE_USER_ALLOCATION))
        return build(self, network, config)

    monkeypatch.setattr(tensorrt_rtx.Builder, "build_serialized_network", noted)
    built(tmp_path, UNFUSED, manifest)
    assert seen == [True, True]
