"""A head as a graph of the contract, and the part of it that is in the target's graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor

from specrt.engines.contract import (
    FEATURE_CACHE,
    FEATURE_ROWS,
    FEATURES,
    INPUT_IDS,
    POSITION_IDS,
    ROW_INDICES,
    UNDRAFTED,
    KVLayer,
    ModelSpec,
    model_contract,
)
from specrt.exporter.heads.config import NUM_TAPS, HeadConfig
from specrt.exporter.heads.module import Head
from specrt.exporter.passes.graph import add_initializer
from specrt.exporter.tracing.emission import emit
from specrt.exporter.tracing.state import AttentionSite, Tracing


def site_of(config: HeadConfig) -> AttentionSite:
    """The attention of a head's layer."""
    layer, head_dim = config.layer, config.head_dim
    return AttentionSite(
        layer.num_attention_heads, layer.num_key_value_heads, head_dim, head_dim**-0.5, 0.0, None, head_dim
    )


def kv_layer_of(config: HeadConfig) -> KVLayer:
    """The KV geometry of a head's layer."""
    site = site_of(config)
    return KVLayer(site.num_kv_heads, site.kv_head_dim)


class HeadModule(torch.nn.Module):
    """A head with the contract's inputs and outputs as its signature. Its logits are over the target's ids."""

    columns: torch.Tensor

    def __init__(self, head: Head, spec: ModelSpec) -> None:
        super().__init__()
        self.head, self.spec = head, spec
        config = head.config
        columns = torch.full((config.vocab_size,), config.draft_vocab_size)  # of the padding
        drafted = torch.arange(config.draft_vocab_size)
        columns[drafted + head.d2t] = drafted
        self.register_buffer("columns", columns)
        self.is_whole = torch.equal(columns, torch.arange(config.vocab_size))
        self.site = site_of(config)

    def forward(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        names = [tensor.name for tensor in model_contract(self.spec).inputs]
        named = dict(zip(names, inputs, strict=True))
        positions, rows = named[POSITION_IDS], named[ROW_INDICES]  # [1, width], [rows]
        state = Tracing(self.spec.dialect, named)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return emit(state, 0, self.site, query, key, value)

        features = named[FEATURE_CACHE][named[FEATURE_ROWS]][None]  # [1, width, H]
        normalized, hidden = self.head(named[INPUT_IDS], features, positions, attend)
        logits = self.head.logits(normalized[:, rows])[0].float()  # [rows, D]
        if not self.is_whole:
            logits = torch.nn.functional.pad(logits, (0, 1), value=UNDRAFTED)[:, self.columns]  # [rows, V]
        return (logits, hidden[0, rows], *state.present[0])


def append_fusing(model: ir.Model, head: Head) -> ir.Model:
    """Fuse the features of a target's graph, [width, 3 Ht], to those of ``head``, [width, H]; unquantized. In place."""
    graph = model.graph
    taps = next(value for value in graph.outputs if value.name == FEATURES)
    fused = _Nodes(model, taps)
    if head.config.variant.fc_norm == "whole":
        rows = fused.normalized(taps, head.fc_norm[0])
    elif head.config.variant.fc_norm == "each":
        sizes = fused.constant(np.full(NUM_TAPS, head.config.target_hidden_size, np.int64))
        parts = fused.add("Split", [taps, sizes], {"axis": -1}, NUM_TAPS)
        rows = fused.add(
            "Concat",
            [fused.normalized(part, norm) for part, norm in zip(parts, head.fc_norm, strict=True)],
            {"axis": -1},
        )[0]
    else:
        rows = taps
    (output,) = fused.add("Gemm", [rows, fused.weight(head.fc.weight)], {"transB": 1})
    taps.name, output.name = f"{FEATURES}.taps", FEATURES
    output.type = taps.type
    output.shape = ir.Shape([taps.shape[0] if taps.shape is not None else None, head.config.hidden_size])
    graph.outputs[list(graph.outputs).index(taps)] = output
    return model


class _Nodes:
    """Nodes appended to a graph, and their initializers."""

    def __init__(self, model: ir.Model, like: ir.Value) -> None:
        self._model, self._dtype = model, like.dtype
        self._num_constants = 0

    def add(self, op_type: str, inputs: list[ir.Value], attributes: dict[str, int], outputs: int = 1) -> list[ir.Value]:
        node = ir.node(op_type, inputs, attributes=attributes, num_outputs=outputs)
        self._model.graph.append(node)
        return list(node.outputs)

    def constant(self, array: object) -> ir.Value:
        self._num_constants += 1
        return add_initializer(self._model, f"{FEATURES}.constant.{self._num_constants}", np.asarray(array))

    def weight(self, parameter: torch.Tensor) -> ir.Value:
        self._num_constants += 1
        tensor = TorchTensor(parameter.detach(), name=f"{FEATURES}.weight.{self._num_constants}")
        value = ir.Value(name=tensor.name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        self._model.graph.register_initializer(value)
        return value

    def normalized(self, rows: ir.Value, norm: Any) -> ir.Value:
        """RMSNorm in fp32, as ``LlamaRMSNorm`` computes it."""
        (wide,) = self.add("Cast", [rows], {"to": int(ir.DataType.FLOAT)})
        (square,) = self.add("Mul", [wide, wide], {})
        (mean,) = self.add("ReduceMean", [square, self.constant(np.array([-1], np.int64))], {"keepdims": 1})
        epsilon = self.constant(np.array(norm.variance_epsilon, np.float32))
        (root,) = self.add("Sqrt", self.add("Add", [mean, epsilon], {}), {})
        (scaled,) = self.add("Div", [wide, root], {})
        assert self._dtype is not None
        (narrow,) = self.add("Cast", [scaled], {"to": int(self._dtype)})
        return self.add("Mul", [narrow, self.weight(norm.weight)], {})[0]
