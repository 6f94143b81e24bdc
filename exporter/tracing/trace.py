"""From a torch model to an ONNX graph that honours the I/O contract, before any optimization of ours."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
import torch
from torch.onnx._internal.exporter._registration import ONNXRegistry

from specrt.engines.contract import (
    CAPACITY,
    FEATURE_SLOTS,
    INPUT_IDS,
    ONNXRUNTIME_DIALECT,
    POSITION_IDS,
    ROW_INDICES,
    ROWS,
    STANDARD_22_DIALECT,
    STANDARD_DIALECT,
    WIDTH,
    ModelSpec,
    TensorSpec,
    model_contract,
    past_name,
)
from specrt.exporter.cutting import only_layers, place_of_layers
from specrt.exporter.heads.graph import HeadModule
from specrt.exporter.heads.module import Head
from specrt.exporter.heads.taps import tapped
from specrt.exporter.passes.simplify import fold_weights, simplify
from specrt.exporter.tracing.attention import IMPLEMENTATION, ContractCache, register
from specrt.exporter.tracing.experts import IMPLEMENTATION as EXPERTS_IMPLEMENTATION
from specrt.exporter.tracing.experts import register_experts
from specrt.exporter.tracing.kinds import Records, record
from specrt.exporter.tracing.longrope import fixed_longrope
from specrt.exporter.tracing.stamping import CannotStamp, Stamp, marked
from specrt.exporter.tracing.standard import STANDARD_22_OPSET, STANDARD_OPSET
from specrt.exporter.tracing.state import Tracing, tracing

_OPSETS = {
    ONNXRUNTIME_DIALECT: 20,
    STANDARD_DIALECT: STANDARD_OPSET,
    STANDARD_22_DIALECT: STANDARD_22_OPSET,
}
_TORCH_DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int64", "int32")}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a contract's dtype name."""
    return _TORCH_DTYPES[name]  # type: ignore[no-any-return]


class _ContractModule(torch.nn.Module):
    """The model with the contract's inputs and outputs as its signature.

    If the spec has features, they are the concatenated hidden states of ``taps``.
    """

    def __init__(self, model: Any, spec: ModelSpec, taps: Sequence[int] = ()) -> None:
        super().__init__()
        self.model = model
        self.spec = spec
        self.taps = taps

    def forward(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        names = [tensor.name for tensor in model_contract(self.spec).inputs]
        named = dict(zip(names, inputs, strict=True))
        num_layers = len(self.spec.kv_layers)
        with tracing(Tracing(self.spec.dialect, named)) as state, tapped(self.model, self.taps) as hidden:
            output = self.model(
                input_ids=named[INPUT_IDS],  # [1, width] i64
                position_ids=named[POSITION_IDS],  # [1, width] i64
                cache=ContractCache(num_layers),
                use_cache=True,
                logits_to_keep=named[ROW_INDICES],  # [rows] i64
            )
        logits = output.logits[0].float()  # [rows, V] f32
        features = [torch.cat([hidden[tap][0] for tap in self.taps], dim=-1)] if self.taps else []  # [width, N Ht]
        present = (tensor for layer in range(num_layers) for tensor in state.present[layer])
        return (logits, *features, *present)


# Sizes of the example inputs' dynamic dimensions: all different, and none 0 or 1, which torch.export special-cases.
_EXAMPLE = {WIDTH: 7, ROWS: 3, CAPACITY: 64, FEATURE_SLOTS: 80}


def _example(tensor: TensorSpec) -> torch.Tensor:
    return torch.zeros(tensor.resolve(_EXAMPLE), dtype=torch_dtype(tensor.dtype))


def _dynamic_dimensions(tensor: TensorSpec) -> dict[int, Any]:
    return {axis: torch.export.Dim.DYNAMIC for axis, dim in enumerate(tensor.shape) if isinstance(dim, str)}


def trace(model: Any, spec: ModelSpec, taps: Sequence[int] = ()) -> ir.Model:
    """Trace ``model`` (a transformers causal LM, in ``spec.dtype``) into an ONNX model with the contract's names.

    One layer of each kind is traced; where that is not possible, all are. Weights use the memory of the torch tensors
    until the graph is saved. The features of ``spec``, if it has any, are the concatenated hidden states of ``taps``:
    0 is the first layer's input and ``i`` the output of layer ``i - 1``.
    """
    with _prepared(model, spec):
        kinds = layer_kinds(model, spec)
        if kinds is not None:
            try:
                return _stamped(model, spec, kinds, taps)
            except CannotStamp:
                pass  # the layers are intertwined in a way that only the graph shows
    return trace_whole(model, spec, taps)


def trace_whole(model: Any, spec: ModelSpec, taps: Sequence[int] = ()) -> ir.Model:
    """Trace ``model`` with all of its layers."""
    with _prepared(model, spec):
        graph = _exported(_ContractModule(model, spec, taps), spec)
    _name_dimensions(graph, spec)
    return simplify(graph)


@contextlib.contextmanager
def _prepared(model: Any, spec: ModelSpec) -> Iterator[None]:
    """Inside the block ``model`` has the contract's attention and experts, and the rotation of ``spec.max_seq_len``."""
    register()
    register_experts()
    attention, experts = model.config._attn_implementation, model.config._experts_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
    try:
        with fixed_longrope(model, spec.max_seq_len):
            yield
    finally:
        model.set_attn_implementation(attention)
        model.set_experts_implementation(experts)


@dataclass(frozen=True)
class LayerKinds:
    """``kept`` are the first layers of each kind; ``kinds`` has the index in ``kept`` of each layer's kind."""

    kept: tuple[int, ...]
    kinds: tuple[int, ...]


def layer_kinds(model: Any, spec: ModelSpec) -> LayerKinds | None:
    """The kinds of the layers of ``model`` with the contract's attention; None where all must be traced.

    A model of the kept layers alone must run the same operators as the whole one, in these layers and around them.
    """
    spec = replace(spec, feature_size=None)
    try:
        parent, name = place_of_layers(model)
        whole = _records(model, spec, getattr(parent, name))
        firsts = [whole.layers.index(layer) for layer in whole.layers]
        kept = tuple(sorted(set(firsts)))
        if len(kept) == len(firsts):
            return None
        with only_layers(model, kept):
            part = _records(model, _spec_of(spec, kept), getattr(parent, name))
    except Exception:  # a model that cannot be recorded can still be traced, or is refused by the trace
        return None
    if part.outside != whole.outside or part.layers != tuple(whole.layers[index] for index in kept):
        return None
    return LayerKinds(kept, tuple(map(kept.index, firsts)))


def _records(model: Any, spec: ModelSpec, layers: Sequence[torch.nn.Module]) -> Records:
    inputs = {tensor.name: _example(tensor) for tensor in model_contract(spec).inputs}
    owners = {past_name(part, index): index for index in range(len(layers)) for part in ("key", "value")}
    with _quiet():
        return record(_ContractModule(model, spec).eval(), layers, inputs, owners)


def _stamped(model: Any, spec: ModelSpec, found: LayerKinds, taps: Sequence[int]) -> ir.Model:
    parent, name = place_of_layers(model)
    layers = getattr(parent, name)
    place = next(path for path, module in model.named_modules() if module is layers)
    part_spec = _spec_of(spec, found.kept)
    with only_layers(model, found.kept), marked([layers[index] for index in found.kept]):
        graph = _exported(_ContractModule(model, part_spec), part_spec)
    _name_dimensions(graph, part_spec)
    stamp = Stamp(graph, f"model.{place}", len(found.kept))
    simplify(graph)
    return fold_weights(stamp.apply(found.kinds, layers, spec, taps))


def _spec_of(spec: ModelSpec, kept: Sequence[int]) -> ModelSpec:
    """The spec of a model of the ``kept`` layers, without features."""
    return replace(spec, kv_layers=tuple(spec.kv_layers[index] for index in kept), feature_size=None)


def trace_head(head: Head, spec: ModelSpec) -> ir.Model:
    """Trace an EAGLE-3 head, in ``spec.dtype``, with the contract of ``spec``."""
    graph = _exported(HeadModule(head, spec), spec)
    _name_dimensions(graph, spec)
    return simplify(graph)


def _exported(module: torch.nn.Module, spec: ModelSpec) -> ir.Model:
    contract = model_contract(spec)
    with torch.no_grad(), _quiet(), _operators_read_once():
        program = torch.onnx.export(
            module.eval(),
            ([_example(tensor) for tensor in contract.inputs],),
            dynamo=True,
            optimize=False,  # our passes start with it, and must see every weight that they are to free
            opset_version=_OPSETS[spec.dialect],
            dynamic_shapes={"inputs": [_dynamic_dimensions(tensor) for tensor in contract.inputs]},
            input_names=[tensor.name for tensor in contract.inputs],
            output_names=[tensor.name for tensor in contract.outputs],
        )
    assert program is not None
    return program.model


def _name_dimensions(model: ir.Model, spec: ModelSpec) -> None:
    """Give the graph's inputs and outputs the contract's symbolic shapes."""
    contract = model_contract(spec)
    for values, tensors in ((model.graph.inputs, contract.inputs), (model.graph.outputs, contract.outputs)):
        for value, tensor in zip(values, tensors, strict=True):
            if value.name != tensor.name:
                raise RuntimeError(f"graph has {value.name!r} where the contract has {tensor.name!r}")
            value.shape = ir.Shape(tensor.shape)


_read_operators = functools.cache(ONNXRegistry.from_torchlib)


@contextlib.contextmanager
def _operators_read_once() -> Iterator[None]:
    """torch.onnx parses the source of all its operators at every export; here the first result is reused."""
    read = vars(ONNXRegistry)["from_torchlib"]
    ONNXRegistry.from_torchlib = staticmethod(_read_operators)  # type: ignore[method-assign]
    try:
        yield
    finally:
        ONNXRegistry.from_torchlib = read  # type: ignore[method-assign]


@contextlib.contextmanager
def _quiet() -> Any:
    """Silence torch.onnx.export, which writes to stdout, warnings and the log; none of it is meant for users."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
