"""Attention over a cache that was updated in place, in several forms of ONNX operators that compute the same in fp16.

``specrt gpu-check`` measures those of ``KIT_FORMS``; ``specrt.tools.lab.attention_forms`` builds all and lists what
their engines copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

_FLOAT, _HALF = 1, 10  # of onnx.TensorProto


@dataclass(frozen=True)
class Heads:
    """The sizes of one layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    capacity: int
    scale: float

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.num_heads // self.num_kv_heads


class Writer:
    """``w("Add", a, b)`` adds a node and returns its output; arrays are initializers. Names begin with ``prefix``."""

    def __init__(self, prefix: str = "") -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self._prefix = prefix

    def __call__(self, op: str, *inputs: Any, named: str | None = None, **attributes: Any) -> str:
        from onnx import helper

        names = [item if isinstance(item, str) else self._constant(item) for item in inputs]
        output = named or f"{self._prefix}value_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, names, [output], name=output, **attributes))
        return output

    def _constant(self, values: Any) -> str:
        from onnx import numpy_helper

        array = np.asarray(values, np.int64) if isinstance(values, tuple) else np.asarray(values)
        self.constants.append(numpy_helper.from_array(array, f"{self._prefix}constant_{len(self.constants)}"))
        return str(self.constants[-1].name)


# (writer, queries [1, H, M, D], keys and values [1, Hkv, C, D], mask [1, 1, M, C], sizes) -> [1, H, M, D]
Form = Callable[[Writer, str, str, str, str, Heads], str]


def operator(w: Writer, query: str, key: str, value: str, mask: str, heads: Heads) -> str:
    """``Attention`` on the updated buffers."""
    return w("Attention", query, key, value, mask, scale=heads.scale)


def reshaped(w: Writer, query: str, key: str, value: str, mask: str, heads: Heads) -> str:
    """``Attention`` on the updated buffers, each through a Reshape to its own shape."""
    shape = (1, heads.num_kv_heads, heads.capacity, heads.head_dim)
    return operator(w, query, w("Reshape", key, shape), w("Reshape", value, shape), mask, heads)


def biased(w: Writer, query: str, key: str, value: str, mask: str, heads: Heads) -> str:
    """``Attention`` with an additive mask."""
    bias = w("Where", mask, np.float16(0), np.float16(-np.inf))
    return operator(w, query, key, value, bias, heads)


def scaled_first(w: Writer, query: str, key: str, value: str, mask: str, heads: Heads) -> str:
    """``Attention`` on queries that are scaled before."""
    return w("Attention", w("Mul", query, np.float16(heads.scale)), key, value, mask, scale=1.0)


def folded_operator(w: Writer, query: str, key: str, value: str, mask: str, heads: Heads) -> str:
    """``Attention`` whose rows are the query heads of a group, row by row."""
    kv, group, dim, capacity = heads.num_kv_heads, heads.group, heads.head_dim, heads.capacity
    rows = w("Transpose", w("Reshape", query, (1, kv, group, -1, dim)), perm=[0, 1, 3, 2, 4])
    rows = w("Reshape", rows, (1, kv, -1, dim))
    seen = w("Expand", w("Unsqueeze", mask, (3,)), (1, 1, 1, group, capacity))
    output = operator(w, rows, key, value, w("Reshape", seen, (1, 1, -1, capacity)), heads)
    output = w("Transpose", w("Reshape", output, (1, kv, -1, group, dim)), perm=[0, 1, 3, 2, 4])
    return w("Reshape", output, (1, heads.num_heads, -1, dim))


def repeated(w: Writer, query: str, key: str, value: str, mask: str, heads: Heads) -> str:
    """Single operators on keys and values that are repeated to all query heads."""
    wide = (1, heads.num_kv_heads, heads.group, heads.capacity, heads.head_dim)
    flat = (1, heads.num_heads, heads.capacity, heads.head_dim)
    keys, values = (w("Reshape", w("Expand", w("Unsqueeze", t, (2,)), wide), flat) for t in (key, value))
    scores = w("MatMul", w("Mul", query, np.float16(heads.scale)), w("Transpose", keys, perm=[0, 1, 3, 2]))
    return w("MatMul", _softmax(w, scores, mask), values)


def folded(transposes: str = "keys", **softmax: bool) -> Form:
    """Single operators, the query heads of a group as rows; ``transposes`` keys, or queries and then scores."""

    def form(w: Writer, query: str, key: str, value: str, mask: str, heads: Heads) -> str:
        kv, dim, capacity = heads.num_kv_heads, heads.head_dim, heads.capacity
        rows = w("Reshape", w("Mul", query, np.float16(heads.scale)), (1, kv, -1, dim))
        if transposes == "keys":
            scores = w("MatMul", rows, w("Transpose", key, perm=[0, 1, 3, 2]))
        else:
            scores = w("MatMul", key, w("Transpose", rows, perm=[0, 1, 3, 2]))
            scores = w("Transpose", scores, perm=[0, 1, 3, 2])
        scores = w("Reshape", scores, (1, kv, heads.group, -1, capacity))
        probs = _softmax(w, scores, w("Unsqueeze", mask, (1,)), **softmax)
        output = w("MatMul", w("Reshape", probs, (1, kv, -1, capacity)), value)
        return w("Reshape", output, (1, heads.num_heads, -1, dim))

    return form


def reduced(w: Writer, query: str, key: str, value: str, mask: str, heads: Heads) -> str:
    """No matmul: products and sums. ONNX Runtime would store all products, 6 GB in a chunk of a 1.5B's layer."""
    kv, dim, capacity = heads.num_kv_heads, heads.head_dim, heads.capacity
    rows = w("Cast", w("Reshape", w("Mul", query, np.float16(heads.scale)), (1, kv, -1, 1, dim)), to=_FLOAT)
    keys, values = (w("Cast", w("Unsqueeze", t, (2,)), to=_FLOAT) for t in (key, value))
    scores = w("ReduceSum", w("Mul", rows, keys), (4,), keepdims=0)  # [1, Hkv, group * M, C]
    scores = w("Reshape", scores, (1, kv, heads.group, -1, capacity))
    probs = w("Softmax", w("Where", w("Unsqueeze", mask, (1,)), scores, np.float32(-np.inf)), axis=-1)
    products = w("Mul", w("Reshape", probs, (1, kv, -1, capacity, 1)), values)
    output = w("Cast", w("ReduceSum", products, (3,), keepdims=0), to=_HALF)
    return w("Reshape", output, (1, heads.num_heads, -1, dim))


def _softmax(w: Writer, scores: str, mask: str, is_bias: bool = False, in_half: bool = False) -> str:
    if is_bias:
        scores = w("Add", scores, w("Where", mask, np.float16(0), np.float16(-60000)))
    else:
        scores = w("Where", mask, scores, np.float16(-np.inf))
    if in_half:
        return w("Softmax", scores, axis=-1)
    return w("Cast", w("Softmax", w("Cast", scores, to=_FLOAT), axis=-1), to=_HALF)


OPERATOR, RESHAPED, TRANSPOSED, SUMS = (
    "Attention",
    "Attention through a Reshape",
    "MatMul, groups folded, queries transposed",
    "products and sums",
)
FORMS: dict[str, Form] = {
    OPERATOR: operator,
    RESHAPED: reshaped,
    "Attention, mask as bias": biased,
    "Attention, queries scaled first": scaled_first,
    "Attention, groups folded into rows": folded_operator,
    "MatMul, heads repeated": repeated,
    "MatMul, groups folded into rows": folded(),
    "the same, softmax in fp16": folded(in_half=True),
    "the same, mask as bias": folded(is_bias=True),
    TRANSPOSED: folded("queries"),
    SUMS: reduced,
}
# The forms of the kit, by the name of their folder.
AS_EXPORTED = "reshape"
KIT_FORMS = {AS_EXPORTED: RESHAPED, "operator": OPERATOR, "matmul": TRANSPOSED, "sums": SUMS}
