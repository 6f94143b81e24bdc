"""Graph passes, each ``graph -> graph`` and testable alone."""

from __future__ import annotations

import onnx_ir as ir

from specrt.engines.contract import STANDARD_DIALECTS, ModelSpec
from specrt.exporter.passes.cache_reads import reshape_cache_reads
from specrt.exporter.passes.experts import lay_out_experts, pair_rows
from specrt.exporter.passes.linear import unify_linears
from specrt.exporter.passes.lm_head import read_tied_table
from specrt.exporter.passes.norms import fuse_norms
from specrt.exporter.passes.packing import pack_qkv, pack_shared_inputs
from specrt.exporter.passes.reshapes import drop_round_trips
from specrt.exporter.passes.rotary import fold_rotary


def optimize(model: ir.Model, spec: ModelSpec) -> ir.Model:
    """All passes of the spec's dialect, in order, on a simplified graph.

    Those after the first three need operators of ``com.microsoft``, or GroupQueryAttention's packed inputs.
    """
    unify_linears(model)
    pair_rows(lay_out_experts(model))
    if spec.dialect in STANDARD_DIALECTS:
        return reshape_cache_reads(read_tied_table(drop_round_trips(model)))
    fuse_norms(model)
    fold_rotary(model, spec.capacity)
    drop_round_trips(model)
    read_tied_table(model)
    pack_qkv(model)
    pack_shared_inputs(model)
    return model
