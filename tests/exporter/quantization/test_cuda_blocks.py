"""Quantized weights under fp16 activations: what ONNX Runtime's CUDA kernels take, and what the graph answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import specrt
from specrt.engines.errors import BackendError, UsageError
from specrt.engines.manifest import manifest_from_bundle
from specrt.exporter.options import ExportOptions
from specrt.exporter.parity.precision import runnable
from specrt.exporter.parity.reference import graph_logits
from specrt.exporter.quantization.blocks import BLOCK_SIZES, quantize_weights
from tests.engines.ort.cuda_kernels import misfits, slow_matmuls
from tests.engines.ort.placement import nodes_on_host
from tests.exporter.tracing.architectures import VOCAB_SIZE
from tests.exporter.tracing.traces import Traces
from tests.exports import Exports
from tests.tiny import save_tiny_model

K = 3
SIZES: dict[str, Any] = {"max_seq_len": 96, "prefill_chunk": 32}


@pytest.fixture(scope="module")
def bundle(exports: Exports) -> Path:
    """A tiny target in int4 that drafts for itself in int8, for CUDA."""
    return exports.bundle(exports.model(), "self:int8", K, quantize="int4", device="cuda", **SIZES)


def graph_of(bundle: Path, role: str) -> onnx.ModelProto:
    return onnx.load(bundle / role / "model.onnx", load_external_data=False)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_cuda_has_kernels_for_every_node(bundle: Path, role: str) -> None:
    graph = graph_of(bundle, role)
    assert list(misfits(graph)) == []
    assert list(slow_matmuls(graph)) == []
    assert nodes_on_host(graph) == []
    bits = {attribute.i for node in graph.graph.node for attribute in node.attribute if attribute.name == "bits"}
    assert bits == ({4, 8} if role == "target" else {8}), "the head has 8 bits"
    assert {node.op_type for node in graph.graph.node} >= {"MatMulNBits", "GroupQueryAttention", "Sub", "Cast"}


def test_the_record_finds_fp32_scales_and_caches(exports: Exports) -> None:
    """The control: the same model with fp32 activations."""
    graph = graph_of(exports.bundle(exports.model(), "ngram", K, quantize="int4", **SIZES), "target")
    found = {misfit.reason.partition(" ")[0] for misfit in misfits(graph)}
    assert found == {"GroupQueryAttention"}
    for tensor in graph.graph.initializer:
        if tensor.name.endswith(".scales"):
            tensor.data_type = onnx.TensorProto.FLOAT16
    assert any("scales in FLOAT16" in misfit.reason for misfit in misfits(graph))


def test_the_fp32_copy_has_the_weights_rounding_only(bundle: Path, exports: Exports) -> None:
    """Its logits are those of the target's blocks in fp32, as far as scales in fp16 allow; the CPU runs fp16 itself."""
    manifest = manifest_from_bundle(bundle)
    entry = manifest.target
    assert (entry.spec.dtype, entry.quantization) == ("float16", "int4")
    assert manifest.backends[0] == "onnxruntime"
    ids = np.load(bundle / entry.reference)["ids"]
    with runnable(bundle / entry.graph, entry.spec, is_quantized=True) as (copy, spec):
        assert (copy.name, spec.dtype) == ("fp32.onnx", "float32")
        exact = graph_logits(copy, spec, ids, threads=1, prepack=True)
    assert not list(bundle.rglob("fp32*"))
    own = graph_logits(bundle / entry.graph, entry.spec, ids, threads=1, prepack=True)
    assert 0 < np.abs(own - exact).max() < 0.02 * np.abs(exact).max(), "activations rounded to fp16"
    fp32 = manifest_from_bundle(exports.bundle(exports.model(), "ngram", K, quantize="int4", **SIZES)).target
    assert entry.parity.mean_kl == pytest.approx(fp32.parity.mean_kl, rel=0.25)


def test_a_bundle_for_cuda_runs_on_the_cpu(bundle: Path) -> None:
    with specrt.load(bundle, threads=1) as runtime:
        options: Any = {"max_new_tokens": 16, "ignore_eos": True}
        plain = runtime.generate([5, 6, 7], draft="none", reproducible=True, **options).token_ids
        assert runtime.generate([5, 6, 7], reproducible=True, **options).token_ids == plain


@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_the_size_of_blocks_is_chosen(size: int, traces: Traces) -> None:
    """Of matmuls; the head and the table keep 32."""
    graph = quantize_weights(traces.optimized("llama", "float16"), "int4", VOCAB_SIZE, size)
    nodes = [{a.name: a.value for a in n.attributes.values()} for n in graph.graph if n.op_type == "MatMulNBits"]
    assert {(node["bits"], node["block_size"]) for node in nodes} == {(4, size), (8, 32)}
    assert {node["accuracy_level"] for node in nodes} == {0}, "CUDA rounds no activations"


def test_offsets_are_padded_to_columns_that_cuda_takes(tmp_path: Path) -> None:
    """Weights on a 4-bit grid, as GGUF's Q4_1: 2 or 3 blocks a row, and so 8 columns of offsets."""
    folder = save_tiny_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if "_proj" in name:
            generator = torch.Generator().manual_seed(3)
            by_block = (tensor.shape[0], tensor.shape[1] // 32, 1)
            levels = torch.randint(0, 16, (*by_block[:2], 32), generator=generator)
            levels[..., :2] = torch.tensor([0, 15])
            scales = 2.0 ** torch.randint(-6, -3, by_block, generator=generator)  # exact in fp16, the sums too
            weights[name] = (levels * scales - 6.5 * scales).reshape(tensor.shape)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    from specrt.exporter.export import export

    exported = export(
        ExportOptions(str(folder), tmp_path / "bundle", "ngram", K, quantize="int4", device="cuda", **SIZES)
    )
    graph = graph_of(tmp_path / "bundle", "target")
    columns = {a.i for node in graph.graph.node for a in node.attribute if a.name == "K"}
    assert columns == {64, 64 + 8, 96 + 8}, "the head has no offsets"
    assert list(misfits(graph)) + list(slow_matmuls(graph)) == []
    assert "Pad" in {node.op_type for node in graph.graph.node}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert exported.target.parity.mean_kl < 0.05, f"{model.config.model_type} is reproduced but for its head"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda", "dtype": "fp32"}, "--dtype fp32: backend onnxruntime runs fp16 .on CUDA its attention"),
        ({"device": "cuda", "quantize": "w8a8"}, "--quantize w8a8: its activations are fp32, got fp16"),
        ({"device": "tpu"}, "device: got 'tpu', expected one of cpu, cuda"),
        ({"quantize": "int4", "block_size": 48}, "--block-size 48: expected 32, 64, 128"),
        ({"block_size": 64}, "--block-size 64: no weights are in blocks; add --quantize"),
        ({"quantize": "w8a8", "block_size": 64}, "--block-size 64: no weights are in blocks"),
        ({"backend": "tensorrt", "quantize": "int4", "block_size": 64}, "--block-size 64: backend tensorrt has blocks"),
    ],
)
def test_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        ExportOptions("x", tmp_path, **options)


def test_a_gpu_backend_is_not_exported_for_the_cpu(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="device cpu: backend tensorrt runs on a GPU only"):
        ExportOptions("x", tmp_path, backend="tensorrt", device="cpu")
    assert ExportOptions("x", tmp_path, device="cuda").dtype == "fp16"
