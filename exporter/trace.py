"""From a torch model to an ONNX graph that honours the I/O contract, before any optimization of ours."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from typing import Any

import onnx_ir as ir
import torch

from specrt.engines.spec import (
    CAPACITY,
    INPUT_IDS,
    ONNXRUNTIME_DIALECT,
    POSITION_IDS,
    ROW_INDICES,
    ROWS,
    STANDARD_DIALECT,
    WIDTH,
    ModelSpec,
    TensorSpec,
    model_contract,
)
from specrt.exporter.attention import IMPLEMENTATION, ContractCache, register
from specrt.exporter.emission import STANDARD_OPSET
from specrt.exporter.experts import IMPLEMENTATION as EXPERTS_IMPLEMENTATION
from specrt.exporter.experts import register_experts
from specrt.exporter.tracing import Tracing, tracing

_OPSETS = {ONNXRUNTIME_DIALECT: 20, STANDARD_DIALECT: STANDARD_OPSET}
_TORCH_DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int64", "int32")}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a contract's dtype name."""
    return _TORCH_DTYPES[name]  # type: ignore[no-any-return]


class _ContractModule(torch.nn.Module):
    """The model with the contract's inputs and outputs as its signature."""

    def __init__(self, model: Any, spec: ModelSpec) -> None:
        super().__init__()
        self.model = model
        self.spec = spec

    def forward(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        names = [tensor.name for tensor in model_contract(self.spec).inputs]
        named = dict(zip(names, inputs, strict=True))
        num_layers = len(self.spec.kv_layers)
        with tracing(Tracing(self.spec.dialect, named)) as state:
            output = self.model(
                input_ids=named[INPUT_IDS],  # [1, width] i64
                position_ids=named[POSITION_IDS],  # [1, width] i64
                cache=ContractCache(num_layers),
                use_cache=True,
                logits_to_keep=named[ROW_INDICES],  # [rows] i64
            )
        logits = output.logits[0].float()  # [rows, V] f32
        present = (tensor for layer in range(num_layers) for tensor in state.present[layer])
        return (logits, *present)


# Dynamic dimensions of the dummy inputs differ, and none of them is 0 or 1 (those would be special-cased).
_EXAMPLE = {WIDTH: 7, ROWS: 3, CAPACITY: 64}


def _example(tensor: TensorSpec) -> torch.Tensor:
    return torch.zeros(tensor.resolve(_EXAMPLE), dtype=torch_dtype(tensor.dtype))


def _dynamic_dimensions(tensor: TensorSpec) -> dict[int, Any]:
    return {axis: torch.export.Dim.DYNAMIC for axis, dim in enumerate(tensor.shape) if isinstance(dim, str)}


def trace(model: Any, spec: ModelSpec) -> ir.Model:
    """Trace ``model`` (a transformers causal LM, in ``spec.dtype``) into an ONNX model with the contract's names.

    Weights stay the torch tensors' own memory until the graph is saved.
    """
    register()
    register_experts()
    model.set_attn_implementation(IMPLEMENTATION)
    model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
    contract = model_contract(spec)
    _freeze_longrope(model, spec.max_seq_len)
    with torch.no_grad(), _quiet():
        program = torch.onnx.export(
            _ContractModule(model, spec).eval(),
            ([_example(tensor) for tensor in contract.inputs],),
            dynamo=True,
            optimize=False,  # our passes begin with it, and must see every weight that they are to let go
            opset_version=_OPSETS[spec.dialect],
            dynamic_shapes={"inputs": [_dynamic_dimensions(tensor) for tensor in contract.inputs]},
            input_names=[tensor.name for tensor in contract.inputs],
            output_names=[tensor.name for tensor in contract.outputs],
        )
    assert program is not None
    _name_dimensions(program.model, spec)
    return program.model


def _name_dimensions(model: ir.Model, spec: ModelSpec) -> None:
    """Give the graph's inputs and outputs the contract's symbolic shapes."""
    contract = model_contract(spec)
    for values, tensors in ((model.graph.inputs, contract.inputs), (model.graph.outputs, contract.outputs)):
        for value, tensor in zip(values, tensors, strict=True):
            if value.name != tensor.name:
                raise RuntimeError(f"graph has {value.name!r} where the contract has {tensor.name!r}")
            value.shape = ir.Shape(tensor.shape)


def _freeze_longrope(model: Any, max_seq_len: int) -> None:
    """Longrope switches factor sets at a length: take the set of ``max_seq_len`` for all positions."""
    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope":
            positions = torch.tensor([[max_seq_len - 1]])
            module(torch.zeros(1, dtype=torch.float32), positions)
            module.rope_type = "default"


@contextlib.contextmanager
def _quiet() -> Any:
    """torch.onnx.export talks on stdout, in warnings and in the log; none of it concerns a user."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
