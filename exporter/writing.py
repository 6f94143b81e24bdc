"""Graphs and weights written to the bundle, and freed afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import onnx_ir as ir

from specrt.engines.progress import Progress
from specrt.exporter.planning import ModelPlan
from specrt.exporter.sharing import share_weights


def write_model(model: ir.Model, plan: ModelPlan, graph: Path, progress: Progress) -> int:
    """Write the graph and its weights; return the bytes of the weights, including those in another graph's file."""
    step = f"{plan.role}: writing"
    if plan.num_layers is None:
        _save(model, graph, step, progress)
        return graph.with_name(f"{graph.name}.data").stat().st_size
    progress.step(step)
    shared_bytes = share_weights(model, graph.with_name("model.onnx"))
    ir.save(model, graph)
    return shared_bytes


def _save(model: ir.Model, graph: Path, step: str, progress: Progress) -> None:
    """Write the graph, and its weights to one file next to it. Tensors are made contiguous one at a time."""
    tensors = [v.const_value for v in model.graph.initializers.values() if v.const_value is not None]
    progress.step(step, total=sum(tensor.nbytes for tensor in tensors))
    ir.save(
        model,
        graph,
        external_data=graph.name + ".data",
        callback=lambda tensor, _: progress.advance(tensor.nbytes),
    )


def release_weights(model: Any, graphs: Iterable[ir.Model]) -> None:
    """Free the memory of all weights now. onnxscript's rules keep a reference to the last graph that they matched."""
    for parameter in model.parameters():
        parameter.data = parameter.new_empty(0)
    for graph in graphs:
        for value in graph.graph.initializers.values():
            value.const_value = None
