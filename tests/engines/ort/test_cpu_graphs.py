"""Graphs that are not those of the contract, or that ONNX Runtime cannot load, are refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from specrt.engines.contract import (
    LOGITS,
    KVLayer,
    ModelSpec,
    model_contract,
)
from specrt.engines.errors import BundleError
from specrt.engines.ort.cpu import OrtEngine
from specrt.engines.samplers import SAMPLER_NAMES, sampler_contract
from specrt.exporter.samplers import sampler_graph
from tests.engines.ort.attention_model import (
    HEAD_DIM,
    HIDDEN,
    KEY,
    NUM_KV_HEADS,
    SPEC,
    make_model,
)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    onnx.save(make_model(), path)
    return path


def refusal(path: Path, spec: ModelSpec = SPEC) -> str:
    """The message with which the graph is refused: one line that names the file."""
    with pytest.raises(BundleError) as caught:
        OrtEngine(path, model_contract(spec), threads=1)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert len(message.splitlines()) == 1
    return message


def rename_input(model: onnx.ModelProto) -> None:
    model.graph.input[0].name = "tokens_in"
    model.graph.node[0].input[1] = "tokens_in"


def drop_output(model: onnx.ModelProto) -> None:
    del model.graph.output[-1]


def add_output(model: onnx.ModelProto) -> None:
    model.graph.output.append(helper.make_tensor_value_info("hidden", TensorProto.FLOAT, [1, "width", HIDDEN]))


def add_input(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("attention_mask", TensorProto.INT64, [1, "width"]))


def retype_input(model: onnx.ModelProto) -> None:
    model.graph.input[1].type.tensor_type.elem_type = TensorProto.INT32


def freeze_width(model: onnx.ModelProto) -> None:
    for index in (0, 1):
        model.graph.input[index].type.tensor_type.shape.dim[1].dim_value = 7


def freeze_rows(model: onnx.ModelProto) -> None:
    model.graph.input[4].type.tensor_type.shape.dim[0].dim_value = 3


def raise_rank(model: onnx.ModelProto) -> None:
    model.graph.input[2].type.tensor_type.shape.dim.add().dim_value = 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (rename_input, "inputs differ from the contract at input_ids: got None, expected ('int64', (1, 'width'))"),
        (drop_output, "outputs differ from the contract at present_value.0: got None, expected ('float32', "),
        (add_output, "outputs differ from the contract at hidden: got ('float32', (1, 'width', 32)), expected None"),
        (add_input, "inputs differ from the contract at attention_mask: got ('int64', (1, 'width')), expected None"),
        (
            retype_input,
            "inputs differ from the contract at position_ids: got ('int32', (1, 'width')), expected ('int64', ",
        ),
        (freeze_width, "inputs differ from the contract at input_ids: got ('int64', (1, 7)), expected ('int64', "),
        (freeze_rows, "inputs differ from the contract at row_indices: got ('int64', (3,)), expected ('int64', "),
        (raise_rank, "inputs differ from the contract at seqlens_k: got ('int32', (1, 1)), expected ('int32', (1,))"),
    ],
)
def test_a_graph_with_other_inputs_or_outputs_is_refused(
    tmp_path: Path, damage: Callable[[onnx.ModelProto], None], message: str
) -> None:
    model = make_model()
    damage(model)
    onnx.save(model, tmp_path / "model.onnx")
    refused = refusal(tmp_path / "model.onnx")
    assert message in refused
    assert refused.endswith("; export the bundle again")


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (replace(SPEC, vocab_size=33), LOGITS),
        (replace(SPEC, kv_layers=(KVLayer(NUM_KV_HEADS, HEAD_DIM + 8),)), KEY),
        (replace(SPEC, kv_layers=(KVLayer(NUM_KV_HEADS - 1, HEAD_DIM),)), KEY),
    ],
    ids=["vocabulary", "head dim", "KV heads"],
)
def test_a_graph_of_another_geometry_is_refused(graph: Path, spec: ModelSpec, name: str) -> None:
    """Found when it is loaded, not in the first pass."""
    assert f"puts differ from the contract at {name}: got " in refusal(graph, spec)


def test_a_graph_without_a_layer_of_the_contract_is_refused(graph: Path) -> None:
    assert "inputs differ from the contract at past_key.1: got None" in refusal(
        graph, replace(SPEC, kv_layers=SPEC.kv_layers * 2)
    )


@pytest.mark.parametrize("share", [None, 0.0, 0.5, 0.999])
def test_a_file_that_cannot_be_read_is_refused(graph: Path, tmp_path: Path, share: float | None) -> None:
    """A missing, an empty and a truncated file."""
    path, content = tmp_path / "model.onnx", graph.read_bytes()
    if share is not None:
        path.write_bytes(content[: int(share * len(content))])
    assert "cannot load it" in refusal(path)


def test_a_graph_that_onnx_runtime_does_not_know_is_refused(tmp_path: Path) -> None:
    model = make_model()
    model.graph.node[0].op_type = "GatherNothing"
    onnx.save(model, tmp_path / "model.onnx")
    assert "cannot load it" in refusal(tmp_path / "model.onnx")


@pytest.mark.parametrize("vocab_size", [SPEC.vocab_size, SPEC.vocab_size - 3])
@pytest.mark.parametrize("name", SAMPLER_NAMES)
def test_a_sampler_of_another_vocabulary_is_refused(tmp_path: Path, name: str, vocab_size: int) -> None:
    """A sampler is loaded for the vocabularies that it was written for: the model's and the target's."""
    path = tmp_path / "sampler.onnx"
    onnx.save(sampler_graph(name, SPEC, vocab_size), path)
    OrtEngine(path, sampler_contract(name, SPEC, vocab_size), threads=1)
    reads_logits = LOGITS in {tensor.name for tensor in sampler_contract(name, SPEC, vocab_size).inputs}
    wrong = (replace(SPEC, vocab_size=33), vocab_size) if reads_logits else (SPEC, vocab_size + 1)
    with pytest.raises(
        BundleError, match=r"differ from the contract at (logits|probs|draft_probs|context_counts): got "
    ):
        OrtEngine(path, sampler_contract(name, *wrong), threads=1)
