"""What TensorRT 10.3's ONNX parser takes, and where a graph asks for more.

Read from onnx-tensorrt at 10.1: its table of operators (``docs/operators.md``, opsets 9 to 20) and its importers
(``onnxOpImporters.cpp``); and from its list of changes in 10.2 and 10.3, which took nothing away. Operators that no
export has are left out, and so is CumSum, of which the importer makes a loop of one step a column until 10.8. It was
not run.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import TensorProto

OPSETS = range(9, 21)
_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})
_NUMBERS = _FLOATS | {TensorProto.INT32, TensorProto.INT64}
_BOOL = frozenset({TensorProto.BOOL})
_ROWS = (
    (_NUMBERS, "Abs Add Div Equal Greater GreaterOrEqual Less LessOrEqual Max Min Mod Mul Neg Pad Range ReduceMax"),
    (_NUMBERS, "ReduceMean ReduceMin ReduceSum ReduceSumSquare Relu ScatterElements ScatterND Sign Sub TopK"),
    (_FLOATS, "Clip Conv Cos Einsum Erf Exp Gemm LayerNormalization Log LogSoftmax MatMul Pow Reciprocal"),
    (_FLOATS, "Sigmoid Sin Softmax Softplus Sqrt Tanh"),
    (_BOOL, "And Not Or Xor"),
    (_NUMBERS | _BOOL, "Cast Concat Constant Expand Flatten Gather GatherElements GatherND Identity OneHot Reshape"),
    (_NUMBERS | _BOOL, "Shape Size Slice Split Squeeze Tile Transpose Trilu Unsqueeze Where"),
    (_NUMBERS, "Gelu"),
    (frozenset({TensorProto.INT8}), "DequantizeLinear"),
)
OPERATORS = {name: types for types, names in _ROWS for name in names.split()}
_INTEGERS = frozenset({TensorProto.INT32, TensorProto.INT64})
_AXES_SECOND = ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "Squeeze", "Unsqueeze")
_CONSTANT_INPUT = {**dict.fromkeys(_AXES_SECOND, 1), "TopK": 1, "OneHot": 1, "Slice": 3, "Pad": 3}
_ONLY = {"Mod": _INTEGERS, "Range": _INTEGERS | {TensorProto.FLOAT}}  # importers that take less than the table says
# Attributes that they refuse. A reduction in ScatterElements needs a plugin.
_REFUSED = {"ScatterND": ("reduction",), "ScatterElements": ("reduction",), "TopK": ("sorted",)}
_MOST_SORTED = 3839


def objections(model: onnx.ModelProto) -> Iterator[str]:
    """A line for each node that the parser would refuse, and for the opset."""
    (opset,) = model.opset_import
    if opset.domain or opset.version not in OPSETS:
        yield f"opset {opset.domain} {opset.version}"
    model = onnx.shape_inference.infer_shapes(model)
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input, *graph.output)}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type not in OPERATORS or node.domain:
            yield f"{node.domain}::{node.op_type}"
            continue
        data = node.input[1] if node.op_type == "Where" else node.input[0]
        if types[data] not in _ONLY.get(node.op_type, OPERATORS[node.op_type]):
            yield f"{node.op_type} of {TensorProto.DataType.Name(types[data])}"
        index = _CONSTANT_INPUT.get(node.op_type, len(node.input))
        if index < len(node.input) and node.input[index] not in constants:
            yield f"{node.op_type} whose input {index} is not a constant"
        if node.op_type == "TopK" and onnx.numpy_helper.to_array(constants[node.input[1]]).item() > _MOST_SORTED:
            yield "TopK of too many"
        for attribute in node.attribute:
            if attribute.name in _REFUSED.get(node.op_type, ()):
                yield f"{node.op_type} with {attribute.name}"
        if node.op_type == "DequantizeLinear" and len(node.input) > 2:
            yield "DequantizeLinear with a zero point"
