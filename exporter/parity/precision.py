"""Half precision at export: whether fp16 holds the model's activations, and how a bf16 graph is checked on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from specrt.engines.contract import ONNXRUNTIME_DIALECT, ModelSpec
from specrt.engines.interface import Array
from specrt.engines.progress import Progress
from specrt.exporter.parity.fp32_copy import widen
from specrt.exporter.parity.reference import reference_logits, wider
from specrt.exporter.tracing.longrope import fixed_longrope, longrope_note

FLOAT16_MAX = 65504.0
_HEADROOM = 2.0


def cast_weights(model: Any, dtype: torch.dtype) -> None:
    """Weights to ``dtype``, one at a time; buffers (rope frequencies) stay in fp32, as when a model is loaded."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def expected_logits(model: Any, spec: ModelSpec, ids: Array, progress: Progress) -> Array:
    """The logits [N, V] f32 of the torch model over ``ids`` that the graph is compared with.

    In bf16 they are computed in fp32, on the weights as rounded to bf16, since only the graph's fp32 copy runs on the
    CPU. Raises ``ParityError`` when they are not finite; ``progress`` gets a line when activations come close to the
    largest fp16 value, and when short texts are rotated otherwise than in transformers.
    """
    if line := longrope_note(model, spec.max_seq_len):
        progress.note(line)
    with fixed_longrope(model, spec.max_seq_len):
        return _expected_logits(model, spec, ids, progress)


def _expected_logits(model: Any, spec: ModelSpec, ids: Array, progress: Progress) -> Array:
    if spec.dtype == "bfloat16":
        cast_weights(model, torch.float32)
        logits = reference_logits(model, ids, spec.dialect)
        cast_weights(model, torch.bfloat16)
        return logits
    logits = reference_logits(model, ids, spec.dialect)
    if spec.dtype == "float16":
        largest = largest_activation(model, ids)
        if largest > FLOAT16_MAX / _HEADROOM:
            progress.note(
                f"activations reach {largest:.0f} on the reference text and fp16 ends at {FLOAT16_MAX:.0f}: "
                f"other texts may overflow on a GPU; {wider(spec.dialect)} has room"
            )
    return logits


def largest_activation(model: Any, ids: Array) -> float:
    """The largest magnitude in the outputs of the modules of ``model`` over ``ids``."""
    largest = 0.0

    def watch(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        nonlocal largest
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            largest = max(largest, float(tensor.abs().max()))

    handles = [module.register_forward_hook(watch) for module in model.modules()]
    try:
        with torch.no_grad():
            model(input_ids=torch.from_numpy(ids)[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return largest


@contextmanager
def runnable(graph: Path, spec: ModelSpec, is_quantized: bool = False) -> Iterator[tuple[Path, ModelSpec]]:
    """A graph and its spec for ONNX Runtime's CPU provider: ``graph``, or its temporary fp32 copy.

    bf16 needs the copy. Quantized fp16 is for CUDA, whose kernels add in other places than the CPU's do.
    """
    is_for_cuda = is_quantized and (spec.dialect, spec.dtype) == (ONNXRUNTIME_DIALECT, "float16")
    if spec.dtype != "bfloat16" and not is_for_cuda:
        yield graph, spec
        return
    copy = graph.with_name("fp32.onnx")
    weights = copy.with_name("fp32.onnx.data")
    try:
        ir.save(widen(ir.load(graph)), copy, external_data=weights.name)
        yield copy, replace(spec, dtype="float32")
    finally:
        copy.unlink(missing_ok=True)
        weights.unlink(missing_ok=True)
