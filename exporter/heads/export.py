"""``specrt export --draft eagle3:HEAD``: the head as a graph of the bundle, which reads the target's features."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch

from specrt.engines.contract import STANDARD_DIALECTS, UNDRAFTED, model_contract
from specrt.engines.interface import Array
from specrt.engines.manifest import ModelEntry
from specrt.engines.processor import available_cores
from specrt.engines.progress import Progress
from specrt.exporter.heads.features import FittedHead
from specrt.exporter.heads.fitting import describe
from specrt.exporter.parity.precision import cast_weights, runnable
from specrt.exporter.parity.reference import check_parity, save_reference
from specrt.exporter.passes import optimize
from specrt.exporter.passes.graph import bytes_per_pass
from specrt.exporter.quantization.blocks import quantize_matmuls, quantize_tables
from specrt.exporter.quantization.qdq import dequantize_weights
from specrt.exporter.sharing import share_weights, write_own_weights
from specrt.exporter.sources.fingerprint import fingerprint_of
from specrt.exporter.sources.source import find_checkpoint, licenses_at
from specrt.exporter.tracing.trace import torch_dtype, trace_head

GRAPH = "target/head.onnx"  # in the target's folder, since it may read the embedding in the target's file


@dataclass(frozen=True)
class WrittenHead:
    """A head's graph in the bundle, and the logits [N, V] f32 that it must reproduce for ``ids`` [N]."""

    fitted: FittedHead
    ids: Array
    expected: Array
    weights_bytes: int
    bytes_per_pass: int


def write_head_graph(fitted: FittedHead, ids: Array, folder: Path, progress: Progress) -> WrittenHead:
    """Write the graph; weights that the target's file has are not written again."""
    plan = fitted.plan
    expected = _expected_logits(fitted, ids)
    progress.step("draft: tracing")
    graph = optimize(trace_head(fitted.module, plan.spec), plan.spec)
    _quantize(graph, fitted)
    read_bytes = bytes_per_pass(graph)
    path = folder / GRAPH
    shared_bytes = share_weights(graph, path.with_name("model.onnx"))
    tensors = [v.const_value for v in graph.graph.initializers.values() if v.const_value is not None]
    total = sum(t.nbytes for t in tensors if not isinstance(t, ir.ExternalTensor))
    progress.step("draft: writing", total=total)
    own_bytes = write_own_weights(graph, path, progress.advance)
    if shared_bytes:
        progress.note(f"draft: {shared_bytes / 1e6:.0f} MB of its weights are the target's and stored once")
    return WrittenHead(fitted, ids, expected, shared_bytes + own_bytes, read_bytes)


def compare_head(written: WrittenHead, folder: Path, samplers: dict[str, str], progress: Progress) -> ModelEntry:
    """Compare the written graph with the torch head on the same features; record both in the bundle."""
    fitted, ids = written.fitted, written.ids
    plan = fitted.plan
    progress.step("draft: comparing with the torch head")
    is_quantized = plan.quantization != "none" or plan.target_quantization != "none"
    with runnable(folder / GRAPH, plan.spec, is_quantized) as (graph, spec):
        parity = check_parity(graph, spec, ids, written.expected, available_cores(), is_quantized, fitted.features)
    (folder / "draft").mkdir()
    save_reference(folder / "draft" / "reference.npz", ids, written.expected, fitted.features)
    for name, content in licenses_at(plan.source, plan.revision).items():
        (folder / "draft" / name).write_bytes(content)
    contract = model_contract(plan.spec)
    return ModelEntry(
        source=plan.source,
        revision=plan.revision,
        fingerprint=fingerprint_of(find_checkpoint(plan.source, plan.revision)),
        architecture=f"EAGLE-3 head ({plan.loaded.layout}; {describe(fitted.module.config.variant)})",
        graph=GRAPH,
        spec=plan.spec,
        inputs=contract.inputs,
        outputs=contract.outputs,
        weights_bytes=written.weights_bytes,
        bytes_per_pass=written.bytes_per_pass,
        reference="draft/reference.npz",
        parity=parity,
        samplers=samplers,
        quantization=plan.quantization,
    )


def attend_causally(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Each pair attends to itself and to those before it. Shapes as in ``module.Attend``."""
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def _expected_logits(fitted: FittedHead, ids: Array) -> Array:
    """Logits [N, V] f32 of the torch head, ``UNDRAFTED`` where it drafts none. In bf16 they are computed in fp32."""
    head, spec = fitted.module, fitted.plan.spec
    dtype = torch.float32 if spec.dtype == "bfloat16" else torch_dtype(spec.dtype)
    cast_weights(head, dtype)
    with torch.no_grad():
        features = torch.from_numpy(fitted.features).to(torch_dtype(spec.dtype)).to(dtype)
        positions = torch.arange(len(ids))[None]
        normalized, _ = head(torch.from_numpy(ids)[None], features[None], positions, attend_causally)
        drafted = head.logits(normalized)[0].float().numpy()
    cast_weights(head, torch_dtype(spec.dtype))
    logits = np.full((len(ids), spec.vocab_size), UNDRAFTED, np.float32)
    logits[:, np.arange(drafted.shape[1]) + head.d2t.numpy()] = drafted
    return logits


def _quantize(graph: ir.Model, fitted: FittedHead) -> None:
    """Quantize the matmuls, ``lm_head`` with 8 bits; a table that is the target's is stored as the target's is."""
    plan = fitted.plan
    is_table_quantized = (plan.target_quantization if fitted.has_target_table else plan.quantization) != "none"
    if plan.spec.dialect in STANDARD_DIALECTS:  # an engine has weights of its own
        if plan.quantization != "none":
            dequantize_weights(graph, plan.quantization, plan.loaded.config.draft_vocab_size)
        return
    if plan.quantization != "none":
        quantize_matmuls(graph, plan.quantization, plan.loaded.config.draft_vocab_size, plan.block_size)
    if is_table_quantized:
        quantize_tables(graph)
