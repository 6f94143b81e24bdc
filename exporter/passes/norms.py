"""Fuse RMS norms, and the residual addition before one, into operators of ONNX Runtime."""

from __future__ import annotations

import onnx_ir as ir
from onnxscript.rewriter.ort_fusions.rms_normalization import fuse_rms_normalization
from onnxscript.rewriter.ort_fusions.skip_normalization import fuse_skip_rms_normalization

_NORM = "SimplifiedLayerNormalization"


def fuse_norms(model: ir.Model) -> ir.Model:
    """Fuse norms. In place.

    ONNX Runtime's kernels take activations and weight of one dtype. A model may multiply by its weight in fp32
    (Gemma's 1 + weight): such a norm stays in fp32, between casts, and its addition is not fused with it.
    """
    fuse_rms_normalization(model)
    for number, node in enumerate([node for node in model.graph if node.op_type == _NORM]):
        _unify_dtypes(model, node, f"norm_input.{number}")
    fuse_skip_rms_normalization(model)
    return model


def _unify_dtypes(model: ir.Model, node: ir.Node, name: str) -> None:
    """Cast to fp32 whichever of activations and weight is not, if they differ. The output was fp32 before, too."""
    inputs = [value for value in node.inputs[:2] if value is not None]
    if len({value.dtype for value in inputs}) < 2:
        return
    for index, value in enumerate(inputs):
        if value.dtype != ir.DataType.FLOAT:
            cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT}, name=f"{name}.{index}")
            wide = cast.outputs[0]
            wide.name, wide.shape, wide.type = cast.name, value.shape, ir.TensorType(ir.DataType.FLOAT)
            model.graph.insert_before(node, cast)
            node.replace_input_with(index, wide)
