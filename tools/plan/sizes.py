"""Bytes and operations of a model from its config alone: no weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrt.engines.contract import (
    ITEM_BYTES,
    ONNXRUNTIME_DIALECT,
    STANDARD_DIALECT,
    ModelSpec,
    model_contract,
    plan_buffers,
)
from specrt.engines.errors import UsageError
from specrt.engines.experts import Experts
from specrt.tools.plan.roofline import ModelCost

PREFILL_CHUNK, DEFAULT_MAX_SEQ_LEN = 512, 2048
NODES_PER_LAYER, OTHER_NODES = 12, 10  # of the exported graphs: 340 for 30 layers of llama, 344 for 28 of qwen2
NODES_OF_EXPERTS = 30  # more in a layer with experts: its router, and the preparation of rows for its experts
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Shape:
    """How a model will be exported: ``dtype`` of DTYPES, ``quantize`` none, int8, w8a8 or int4.

    A model whose own context is shorter than ``max_seq_len`` keeps its own.
    """

    dtype: str
    quantize: str
    max_seq_len: int
    k: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UsageError(f"--dtype {self.dtype}: expected {', '.join(DTYPES)}")
        if self.max_seq_len < 1 or self.k < 1:
            raise UsageError(f"got --max-seq-len {self.max_seq_len} and K {self.k}, expected 1 or more of each")


def cost_of(name: str, shape: Shape, revision: str | None = None, trust_remote_code: bool = False) -> ModelCost:
    """The cost of ``name``: a hub id, a folder with a config.json, that file, or a .gguf file.

    Raises ``SourceError`` when its config cannot be read and ``UnsupportedModelError`` when it cannot be exported.
    """
    from specrt.exporter.sources.adapters import find_adapted_config
    from specrt.exporter.tracing.observe import observe

    config = find_adapted_config(name, revision, trust_remote_code)
    path = Path(name)
    shown = path.parent.name if path.name == "config.json" else path.name
    return _cost(shown, config, observe(config, trust_remote_code), shape)


def _cost(name: str, config: Any, observation: Any, shape: Shape) -> ModelCost:
    weight_bytes, table_weight_bytes = bytes_per_weight(shape)
    text = config.get_text_config()
    length = min(shape.max_seq_len, observation.max_position_embeddings or shape.max_seq_len)
    item_bytes = ITEM_BYTES[DTYPES[shape.dtype]]
    table = observation.vocab_size * int(text.hidden_size)
    is_tied = bool(getattr(config, "tie_word_embeddings", False))
    inner = observation.num_parameters - table * (1 if is_tied else 2)
    table_bytes, inner_bytes = int(table * table_weight_bytes), int(inner * weight_bytes)
    experts, unread = _experts(name, observation, shape, weight_bytes)
    spec = ModelSpec(
        vocab_size=observation.vocab_size,
        max_seq_len=length,
        capacity=length + shape.k,
        max_width=min(PREFILL_CHUNK, length),
        max_rows=shape.k + 1,
        dtype=DTYPES[shape.dtype],
        kv_layers=observation.kv_layers,
    )
    return ModelCost(
        name=name,
        weights_bytes=inner_bytes + table_bytes * (1 if is_tied else 2),
        bytes_per_pass=inner_bytes + table_bytes - int(unread * weight_bytes),
        max_seq_len=length,
        kv_bytes=spec.kv_bytes,
        kv_bytes_per_token=spec.kv_bytes // spec.capacity,
        scratch_bytes=_scratch_bytes(spec, text, item_bytes),
        flops_per_token=2 * (inner - unread + table),
        num_nodes=NODES_PER_LAYER * len(spec.kv_layers) + OTHER_NODES + NODES_OF_EXPERTS * len(observation.experts),
        experts=experts,
    )


def _experts(name: str, observation: Any, shape: Shape, weight_bytes: float) -> tuple[Experts | None, int]:
    """The experts of which a pass reads some, and the number of parameters that a pass of one token does not read.

    With bf16, which only TensorRT has, a pass reads and computes all of them. Raises ``UsageError`` for a combination
    that is not exported.
    """
    from specrt.exporter.planning import check_experts

    dialect = ONNXRUNTIME_DIALECT if shape.dtype == "fp32" else STANDARD_DIALECT
    check_experts(name, observation, dialect, shape.quantize)
    sites = [site for site in observation.experts if site.is_sparse]
    if not sites or shape.dtype == "bf16":
        return None, 0
    unread = sum(
        site.num_parameters * (site.num_experts - site.experts_per_token) // site.num_experts for site in sites
    )
    parameters = sum(site.num_parameters for site in sites)
    count, per_token = sites[0].num_experts, sites[0].experts_per_token
    bytes_per_expert = int(parameters * weight_bytes) // (len(sites) * count)
    return Experts(len(sites), count, per_token, bytes_per_expert), unread


def bytes_per_weight(shape: Shape) -> tuple[float, float]:
    """(of matmuls, of head and table). With fp32 the integer formats are ONNX Runtime's, with fp16 and bf16 TensorRT's.

    Raises ``UsageError`` for a quantization that the dtype does not have.
    """
    from specrt.exporter.quantization import blocks, qdq

    if shape.quantize == "none":
        item_bytes = ITEM_BYTES[DTYPES[shape.dtype]]
        return item_bytes, item_bytes
    rows = blocks.QUANTIZATIONS if shape.dtype == "fp32" else qdq.LAYOUTS
    table = blocks.TABLE if shape.dtype == "fp32" else qdq.TABLE
    if shape.quantize not in rows:
        raise UsageError(f"--quantize {shape.quantize}: expected none, {', '.join(rows)} with --dtype {shape.dtype}")
    return rows[shape.quantize].bytes_per_weight(), table.bytes_per_weight()


def _scratch_bytes(spec: ModelSpec, text_config: Any, item_bytes: int) -> int:
    """Inputs and outputs other than the KV, the samplers' probabilities, and one layer's activations of a chunk."""
    kv_names = {tensor.name for tensor in model_contract(spec).inputs if len(tensor.shape) == 4}
    bound = sum(buffer.num_bytes for buffer in plan_buffers(model_contract(spec)) if buffer.name not in kv_names)
    probabilities = 2 * spec.max_rows * spec.vocab_size * ITEM_BYTES["float32"]
    inner = int(getattr(text_config, "intermediate_size", 0) or 4 * text_config.hidden_size)
    return bound + probabilities + spec.max_width * (4 * int(text_config.hidden_size) + 2 * inner) * item_bytes
