"""A small writer of ONNX graphs: ``g.Softmax(x, axis=-1)`` adds a node and returns the name of its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from specrt.engines.contract import INPUT_IDS, ROW_INDICES, Contract, TensorSpec
from specrt.engines.interface import Array

OPSET = 18
IR_VERSION = 10
END = np.iinfo(np.int64).max
_ELEMENT_TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}


class GraphWriter:
    """One graph that honours ``contract``. Operators are methods in their ONNX names.

    ``named`` names the output (one of the contract); ``outputs`` is their number, then a tuple of names is returned.
    """

    def __init__(self, name: str, contract: Contract) -> None:
        self._name, self._contract = name, contract
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
            inputs=[_value_info(tensor) for tensor in self._contract.inputs],
            outputs=[_value_info(tensor) for tensor in self._contract.outputs],
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


def row_numbers(g: GraphWriter, rows: str) -> str:
    """0, 1, 2 ... for the rows of a tensor [R] of int64. [R] i64

    Counted in float32: TensorRT 10.3's parser sums no integers.
    """
    ones = g.Add(g.Mul(g.Cast(rows, to=TensorProto.FLOAT), g.const([0.0])), g.const([1.0]))
    return str(g.Cast(g.Sub(g.CumSum(ones, g.const(0, "int64")), ones), to=TensorProto.INT64))
