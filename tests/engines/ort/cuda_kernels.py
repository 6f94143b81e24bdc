"""Which dtypes ONNX Runtime's CUDA kernels take, for the operators of models: a record of its own list.

docs/OperatorKernels.md of onnxruntime, CUDAExecutionProvider (commit 001d12d2623f), read on 2026-12-01; for
``MatMulNBits`` also contrib_ops/cuda/quantization/matmul_nbits.cc, matmul_4bits.cu and matmul_8bits.cu.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx

_HALF, _FLOAT, _INT32, _INT64, _BYTES = "FLOAT16", "FLOAT", "INT32", "INT64", "UINT8"
_FLOATS = {_HALF, _FLOAT}
_ANY = {*_FLOATS, _INT32, _INT64, _BYTES}
# By operator: the dtypes of its inputs, those of the last entry for all further ones.
KERNELS: dict[str, list[set[str]]] = {
    "Add": [_FLOATS | {_INT32, _INT64}],
    "Cast": [_ANY],
    "Concat": [_ANY],
    "Gather": [_ANY, {_INT32, _INT64}],
    "GatherND": [{*_FLOATS, _INT64}, {_INT64}],
    "Mul": [_ANY],
    "Pad": [_FLOATS, {_INT64}],
    "ReduceSum": [{*_FLOATS, _INT32, _INT64}, {_INT64}],
    "Reshape": [_ANY, {_INT64}],
    "Sigmoid": [_FLOATS],
    "Slice": [_ANY, {_INT32, _INT64}],
    "Split": [_ANY, {_INT64}],
    "Sub": [_ANY],
    "Transpose": [_ANY],
    "Unsqueeze": [_ANY, {_INT64}],
    "SimplifiedLayerNormalization": [_FLOATS],
    "SkipSimplifiedLayerNormalization": [_FLOATS],
    # query, key, value, both caches; seqlens_k, total_sequence_length; cos and sin; position_ids
    "GroupQueryAttention": [*[{_HALF}] * 5, {_INT32}, {_INT32}, {_HALF}, {_HALF}, {_INT64}],
    "MatMulNBits": [_FLOATS, {_BYTES}, _FLOATS, {_BYTES}],
}
_SAME = {"Concat": 0, "Mul": 2, "Sub": 2, "Add": 2}  # operators whose inputs have one dtype; 0: all of them
_SAME |= {"SimplifiedLayerNormalization": 2, "SkipSimplifiedLayerNormalization": 3}
# Of the kernels for few rows: block sizes in bits, and what N and K must be multiples of. Others widen the weight.
FAST_BLOCKS = {4: {16, 32, 64, 128}, 8: {16, 32, 64, 128, 256}}
FAST_MULTIPLE = 8


@dataclass(frozen=True)
class Misfit:
    """A node for which CUDA has no kernel, and why."""

    node: str
    reason: str


def dtypes_of(model: onnx.ModelProto) -> dict[str, str]:
    """The dtype of every value. Except that of Cast, outputs have the dtype of the first input."""
    name = onnx.TensorProto.DataType.Name
    graph = model.graph
    found = {value.name: name(value.type.tensor_type.elem_type) for value in graph.input}
    found |= {tensor.name: name(tensor.data_type) for tensor in graph.initializer}
    for node in graph.node:
        to = next((attribute.i for attribute in node.attribute if attribute.name == "to"), None)
        found |= dict.fromkeys(node.output, found[node.input[0]] if to is None else name(to))
    return found


def misfits(model: onnx.ModelProto) -> Iterator[Misfit]:
    """The nodes of ``model`` that the CUDA provider would not take."""
    dtypes = dtypes_of(model)
    for node in model.graph.node:
        if node.op_type not in KERNELS:
            yield Misfit(node.name, f"{node.op_type} is not in the record")
            continue
        taken = KERNELS[node.op_type]
        inputs = [dtypes[value] if value else None for value in node.input]
        for position, dtype in enumerate(inputs):
            if dtype is not None and dtype not in taken[min(position, len(taken) - 1)]:
                yield Misfit(node.name, f"{node.op_type} takes no {dtype} at {position}")
        if node.op_type in _SAME and len(set(inputs[: _SAME[node.op_type] or None])) > 1:
            yield Misfit(node.name, f"{node.op_type} mixes {inputs}")
        if node.op_type == "MatMulNBits" and inputs[0] != inputs[2]:
            yield Misfit(node.name, f"MatMulNBits has activations in {inputs[0]} and scales in {inputs[2]}")


def slow_matmuls(model: onnx.ModelProto) -> Iterator[Misfit]:
    """The quantized matmuls that CUDA's kernels for few rows do not take: they widen the whole weight in every pass."""
    for node in model.graph.node:
        if node.op_type == "MatMulNBits":
            given = {attribute.name: attribute.i for attribute in node.attribute}
            size, bits = given["block_size"], given["bits"]
            if size not in FAST_BLOCKS[bits] or given["N"] % FAST_MULTIPLE or given["K"] % FAST_MULTIPLE:
                yield Misfit(node.name, f"blocks of {size}, N {given['N']}, K {given['K']}")
            elif bits == 8 and given["K"] % size:
                yield Misfit(node.name, f"K {given['K']} is no multiple of {size}")
