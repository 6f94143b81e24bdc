"""From a torch model to an ONNX graph that honours the I/O contract, before any optimization of ours."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from typing import Any

import onnx_ir as ir
import torch

from specrt.engines.spec import CAPACITY, ROWS, WIDTH, ModelSpec, TensorSpec, model_contract
from specrt.exporter.attention import IMPLEMENTATION, ContractCache, Tracing, register, tracing

OPSET = 20
_TORCH_DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int64", "int32")}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a contract's dtype name."""
    return _TORCH_DTYPES[name]  # type: ignore[no-any-return]


class _ContractModule(torch.nn.Module):
    """The model with the contract's inputs and outputs as its signature."""

    def __init__(self, model: Any, num_layers: int) -> None:
        super().__init__()
        self.model = model
        self.num_layers = num_layers

    def forward(
        self,
        input_ids: torch.Tensor,  # [1, width] i64
        position_ids: torch.Tensor,  # [1, width] i64
        seqlens_k: torch.Tensor,  # [1] i32
        total: torch.Tensor,  # [1] i32
        row_indices: torch.Tensor,  # [rows] i64
        past: list[torch.Tensor],  # 2 a layer: [1, num_kv_heads, capacity, head_dim]
    ) -> tuple[torch.Tensor, ...]:
        with tracing(Tracing(past, seqlens_k, total)) as state:
            output = self.model(
                input_ids=input_ids,
                position_ids=position_ids,
                cache=ContractCache(self.num_layers),
                use_cache=True,
                logits_to_keep=row_indices,
            )
        logits = output.logits[0].float()  # [rows, V] f32
        present = (tensor for layer in range(self.num_layers) for tensor in state.present[layer])
        return (logits, *present)


def _example(tensor: TensorSpec, width: int) -> torch.Tensor:
    """A dummy input: dynamic dimensions get sizes that differ, none of them 0 or 1 (those would be special-cased)."""
    shape = tensor.resolve({WIDTH: width, ROWS: 3, CAPACITY: 64})
    return torch.zeros(shape, dtype=torch_dtype(tensor.dtype))


def _examples(spec: ModelSpec) -> tuple[Any, ...]:
    width = 7
    contract = model_contract(spec)
    head, past = contract.inputs[:5], contract.inputs[5:]
    input_ids, position_ids, seqlens_k, total, row_indices = (_example(tensor, width) for tensor in head)
    position_ids += torch.arange(width)
    row_indices += torch.tensor([3, 4, 6])
    return (
        input_ids,
        position_ids,
        seqlens_k + width - 1,
        total + width,
        row_indices,
        [_example(t, width) for t in past],
    )


def _dynamic_shapes(spec: ModelSpec) -> dict[str, Any]:
    dynamic = torch.export.Dim.DYNAMIC
    return {
        "input_ids": {1: dynamic},
        "position_ids": {1: dynamic},
        "seqlens_k": None,
        "total": None,
        "row_indices": {0: dynamic},
        "past": [{2: dynamic}] * (2 * len(spec.kv_layers)),
    }


def trace(model: Any, spec: ModelSpec) -> ir.Model:
    """Trace ``model`` (a transformers causal LM, in ``spec.dtype``) into an ONNX model with the contract's names.

    Weights stay the torch tensors' own memory until the graph is saved.
    """
    register()
    model.set_attn_implementation(IMPLEMENTATION)
    contract = model_contract(spec)
    num_layers = len(spec.kv_layers)
    _freeze_longrope(model, spec.max_seq_len)
    with torch.no_grad(), _quiet():
        program = torch.onnx.export(
            _ContractModule(model, num_layers).eval(),
            _examples(spec),
            dynamo=True,
            optimize=False,  # our passes begin with it, and must see every weight that they are to let go
            opset_version=OPSET,
            dynamic_shapes=_dynamic_shapes(spec),
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
