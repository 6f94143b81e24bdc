"""A model of one layer, made here: its ONNX graph with GroupQueryAttention, and the same in numpy without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from specrt.engines.contract import (
    INPUT_IDS,
    LOGITS,
    POSITION_IDS,
    ROW_INDICES,
    SEQLENS_K,
    TOTAL_SEQUENCE_LENGTH,
    KVLayer,
    ModelSpec,
    TensorSpec,
    model_contract,
    past_name,
    present_name,
)
from specrt.engines.interface import Array
from specrt.engines.ort.cpu import OrtEngine
from specrt.engines.samplers import MATCH, sampler_contract
from specrt.exporter.samplers import sampler_graph

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8
HIDDEN = NUM_HEADS * HEAD_DIM
SPEC = ModelSpec(
    vocab_size=32,
    max_seq_len=90,
    capacity=99,
    max_width=72,
    max_rows=9,
    dtype="float32",
    kv_layers=(KVLayer(NUM_KV_HEADS, HEAD_DIM),),
)
KEY, VALUE = past_name("key", 0), past_name("value", 0)
TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64, "int32": TensorProto.INT32}


@dataclass(frozen=True)
class Weights:
    """Embeddings of tokens and positions, projections, and the unembedding; all f32."""

    token: Array  # [V, H]
    position: Array  # [capacity, H]
    query: Array  # [H, H]
    key: Array  # [H, kv]
    value: Array  # [H, kv]
    output: Array  # [H, V]


def make_weights() -> Weights:
    rng = np.random.default_rng(0)
    kv = NUM_KV_HEADS * HEAD_DIM
    shapes = [(SPEC.vocab_size, HIDDEN), (SPEC.capacity, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, kv), (HIDDEN, kv)]
    shapes.append((HIDDEN, SPEC.vocab_size))
    return Weights(*(rng.normal(0, 0.5, shape).astype(np.float32) for shape in shapes))


WEIGHTS = make_weights()


def value_info(tensor: TensorSpec) -> Any:
    return helper.make_tensor_value_info(tensor.name, TYPES[tensor.dtype], tensor.shape)


def make_model() -> onnx.ModelProto:
    """Token and position embeddings, one GroupQueryAttention, the requested rows, the unembedding."""
    attention = [KEY, VALUE, SEQLENS_K, TOTAL_SEQUENCE_LENGTH]
    present = [present_name("key", 0), present_name("value", 0)]
    nodes = [
        helper.make_node("Gather", ["token", INPUT_IDS], ["token_rows"]),  # [1, W, H]
        helper.make_node("Gather", ["position", POSITION_IDS], ["position_rows"]),
        helper.make_node("Add", ["token_rows", "position_rows"], ["hidden"]),
        *(helper.make_node("MatMul", ["hidden", name], [name[0]]) for name in ("query", "key", "value")),
        helper.make_node(
            "GroupQueryAttention",
            ["q", "k", "v", *attention],
            ["attended", *present],
            domain="com.microsoft",
            num_heads=NUM_HEADS,
            kv_num_heads=NUM_KV_HEADS,
        ),
        helper.make_node("Add", ["hidden", "attended"], ["sum"]),
        helper.make_node("Squeeze", ["sum", "axis_0"], ["all_rows"]),  # [W, H]
        helper.make_node("Gather", ["all_rows", ROW_INDICES], ["rows_kept"]),  # [R, H]
        helper.make_node("MatMul", ["rows_kept", "output"], [LOGITS]),  # [R, V]
    ]
    constants = {**vars(WEIGHTS), "axis_0": np.array([0], np.int64)}
    contract = model_contract(SPEC)
    graph = helper.make_graph(
        nodes,
        "tiny",
        inputs=[value_info(tensor) for tensor in contract.inputs],
        outputs=[value_info(tensor) for tensor in contract.outputs],
        initializer=[numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def logits_without_cache(ids: Sequence[int]) -> Array:
    """The model in numpy, causal by a mask over the whole sequence. [T, V]"""
    hidden = WEIGHTS.token[list(ids)] + WEIGHTS.position[: len(ids)]  # [T, H]
    query = (hidden @ WEIGHTS.query).reshape(-1, NUM_HEADS, HEAD_DIM)  # [T, N, D]
    key, value = ((hidden @ w).reshape(-1, NUM_KV_HEADS, HEAD_DIM) for w in (WEIGHTS.key, WEIGHTS.value))
    key, value = (np.repeat(x, NUM_HEADS // NUM_KV_HEADS, axis=1) for x in (key, value))  # [T, N, D]
    scores = np.einsum("qnd,knd->nqk", query, key) / np.sqrt(HEAD_DIM)
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    attended = np.einsum("nqk,knd->qnd", weights, value).reshape(len(ids), HIDDEN)
    logits: Array = (hidden + attended) @ WEIGHTS.output
    return logits


def match_sampler(folder: Path) -> OrtEngine:
    """The match sampler for rows of the model, in ONNX Runtime."""
    onnx.save(sampler_graph(MATCH, SPEC, SPEC.vocab_size), folder / "match.onnx")
    return OrtEngine(folder / "match.onnx", sampler_contract(MATCH, SPEC, SPEC.vocab_size), threads=1)
