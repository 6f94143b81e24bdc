"""Simplify every traced graph: fold constants, shorten reshapes, drop repeated and unused nodes.

``onnxscript.optimizer.optimize_ir`` does the same with all of its rewrite rules; those used here are the ones that
match in traced language models. It tries every rule on every node, and one rule compares each node with all others.
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript import rewriter
from onnxscript.optimizer import fold_constants_ir
from onnxscript.rewriter.rules import common as rules

_NUM_ROUNDS = 2
_RULES = (
    rules.mul_by_1_rule,
    rules.add_0_rule,
    rules.sub_0_rule,
    rules.div_by_1_rule,
    rules.collapse_slice_rule,
    rules.collapse_slice2_rule,
    rules.materialize_reshape_shape_rule,
    rules.cast_cast_rule,
    rules.no_op_cast_rule,
    rules.no_op_expand_rule,
    rules.no_op_transpose_rule,
    rules.reshape_reshape_rule,
    rules.squeeze_reshape_1d_rule,
    rules.transpose_transpose_rule,
    rules.unsqueeze_unsqueeze_rule,
)


def simplify(model: ir.Model) -> ir.Model:
    """Fold what is constant; transposed weights stay views. In place."""
    common.InlinePass()(model)
    rewrite = rewriter.RewritePass(_RULES)
    for _ in range(_NUM_ROUNDS):
        fold_constants_ir(model, onnx_shape_inference=True)
        rewrite(model)
        common.RemoveUnusedNodesPass()(model)
        common.RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
        common.RemoveUnusedOpsetsPass()(model)
    return _clean(model)


def fold_weights(model: ir.Model) -> ir.Model:
    """Fold what became constant in a simplified graph when its weights were added. In place."""
    fold_constants_ir(model)
    return _clean(model)


def _clean(model: ir.Model) -> ir.Model:
    """Drop unused and repeated nodes, turn constants into initializers, and make names unique."""
    ir.passes.Sequential(
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )(model)
    return model
