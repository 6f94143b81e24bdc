"""The head of tied embeddings reads the embedding table as it is in memory, so the table is stored once.

Before:  MatMul(x [1, R, H], Transpose(table [V, H])) -> [1, R, V]
After:   Reshape(Gemm(Reshape(x) [R, H], table, transB=1)) -> [1, R, V]

Otherwise the engine would fold the transpose into a second copy of the table at every load.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from specrt.exporter.passes.graph import add_initializer, producer, remove_unused, replace_node


def read_tied_table(model: ir.Model) -> ir.Model:
    """Turn each MatMul by a transposed initializer into a Gemm that reads it untransposed."""
    for node in list(model.graph):
        transpose = producer(node.inputs[1], "Transpose") if node.op_type == "MatMul" else None
        table = transpose.inputs[0] if transpose is not None else None
        if transpose is None or table is None or table.const_value is None or table.shape is None:
            continue
        if list(transpose.attributes["perm"].as_ints()) != [1, 0]:
            continue
        vocab_size, hidden_size = table.const_value.numpy().shape
        flat = add_initializer(model, f"{node.name}.flat", np.array([-1, hidden_size], np.int64))
        wide = add_initializer(model, f"{node.name}.wide", np.array([1, -1, vocab_size], np.int64))
        rows = ir.node("Reshape", [node.inputs[0], flat])
        gemm = ir.node("Gemm", [rows.outputs[0], table], attributes={"transB": 1})
        back = ir.node("Reshape", [gemm.outputs[0], wide])
        replace_node(model, node, [rows, gemm, back])
    remove_unused(model)
    return model
