"""A small writer of ONNX graphs: ``g.Softmax(x, axis=-1)`` adds a node and returns the name of its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from specrt.engines.contract import INPUT_IDS, ROW_INDICES, ROWS, Contract, TensorSpec
from specrt.engines.interface import Array

OPSET = 18
IR_VERSION = 10
END = np.iinfo(np.int64).max
_VECTOR = 32  # a multiple of the numbers that a kernel reads at once
_ELEMENT_TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}


class GraphWriter:
    """One graph that honours ``contract``. Operators are methods in their ONNX names.

    ``named`` names the output (one of the contract); ``outputs`` is their number, then a tuple of names is returned.
    ``has_cumsum``: whether the library that reads the graph has a kernel for CumSum. TensorRT's parser before 10.8
    makes a loop of it.
    """

    def __init__(self, name: str, contract: Contract, has_cumsum: bool = True) -> None:
        self._name, self.contract, self.has_cumsum = name, contract, has_cumsum
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[tuple[str, bytes, tuple[int, ...]], str] = {}
        self._initializers: list[onnx.TensorProto] = []

    def __getattr__(self, op: str) -> Callable[..., Any]:
        if not op[0].isupper():
            raise AttributeError(op)

        def add(*inputs: str, named: str | None = None, outputs: int = 1, **attributes: Any) -> str | tuple[str, ...]:
            stem = f"{op}_{len(self._nodes)}"
            names = tuple([named] if named else [stem] if outputs == 1 else [f"{stem}.{i}" for i in range(outputs)])
            self._nodes.append(helper.make_node(op, list(inputs), list(names), name=stem, **attributes))
            return names[0] if outputs == 1 else names

        return add

    def const(self, value: Any, dtype: str = "float32") -> str:
        """The name of an initializer; equal ones are stored once."""
        array: Array = np.array(value, dtype)
        key = (dtype, array.tobytes(), array.shape)
        if key not in self._constants:
            self._constants[key] = f"constant_{len(self._constants)}"
            self._initializers.append(numpy_helper.from_array(array, self._constants[key]))
        return self._constants[key]

    def ints(self, *values: int) -> str:
        """A constant list of int64, such as axes."""
        return self.const(values, "int64")

    def model(self) -> onnx.ModelProto:
        """The checked graph."""
        graph = helper.make_graph(
            self._nodes,
            self._name,
            inputs=[_value_info(tensor) for tensor in self.contract.inputs],
            outputs=[_value_info(tensor) for tensor in self.contract.outputs],
            initializer=self._initializers,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
        onnx.checker.check_model(model, full_check=True)
        return model


def _value_info(tensor: TensorSpec) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(tensor.name, _ELEMENT_TYPES[tensor.dtype], list(tensor.shape))


def drafted_ids(g: GraphWriter) -> str:
    """The id that each row verifies: the one fed at the next row; 0 in the last, which verifies none. [R] i64"""
    fed = g.Gather(g.Squeeze(INPUT_IDS, g.ints(0)), ROW_INDICES)  # [R]
    return str(g.Concat(g.Slice(fed, g.ints(1), g.ints(END), g.ints(0)), g.ints(0), axis=0))


def row_numbers(g: GraphWriter, rows: str, dtype: str = "int64") -> str:
    """0, 1, 2 ... for the rows of a tensor [R] of ``dtype``. [R]

    As many of a constant as there are rows: nothing is counted, and no shape is read.
    """
    most = g.contract.limits[ROWS]
    numbers = g.Concat(g.const(np.arange(most), dtype), rows, axis=0)  # [most + R]
    return str(g.Slice(numbers, g.ints(0), g.ints(-most), g.ints(0)))


def running_sums(g: GraphWriter, rows: str, length: int) -> str:
    """The sum of each row up to each of its columns, of which there are ``length``. [R, N] f32 -> [R, N]

    Without CumSum each is a sum of its own, over a whole row with zeros in the place of later columns: the order of the
    additions is the same in all of them, so that none is less than the one before. Rows are padded, since kernels add
    those in another order that do not begin at a multiple of their vectors' size.
    """
    if g.has_cumsum:
        return str(g.CumSum(rows, g.const(1, "int64")))
    if padding := -length % _VECTOR:
        rows = g.Pad(rows, g.ints(0, 0, 0, padding))
    columns, ends = np.arange(length + padding)[None], np.arange(length)[:, None]
    counts = g.Cast(g.LessOrEqual(g.const(columns), g.const(ends)), to=TensorProto.FLOAT)  # [N, N + padding]
    return str(g.ReduceSum(g.Mul(g.Unsqueeze(rows, g.ints(1)), counts), g.ints(2), keepdims=0))


def barrier(g: GraphWriter, column: str) -> str:
    """``column`` [R, 1] f32 as it is, by an operator that TensorRT does not join with its neighbours."""
    if g.has_cumsum:
        return str(g.CumSum(column, g.const(1, "int64")))
    values, _ = g.TopK(column, g.ints(1), axis=1, outputs=2)
    return str(values)
