"""The nodes that fuse a target's hidden states compute what the torch head does."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from specrt.engines.contract import FEATURES
from specrt.exporter.heads.config import FcNorm, HeadVariant
from specrt.exporter.heads.graph import append_fusing
from specrt.exporter.parity.precision import cast_weights
from tests.exporter.heads.making import SIZE, TAPS, head_config, random_head

_TYPES = {torch.float32: ir.DataType.FLOAT, torch.float16: ir.DataType.FLOAT16}


def hidden_states(dtype: torch.dtype) -> ir.Model:
    """A graph whose features are its input, [width, 3 Ht]."""
    shape, kind = ir.Shape(["width", 3 * SIZE]), ir.TensorType(_TYPES[dtype])
    given = ir.Value(name="given", shape=shape, type=kind)
    node = ir.node("Identity", [given])
    output = node.outputs[0]
    output.name, output.shape, output.type = FEATURES, shape, kind
    return ir.Model(ir.Graph([given], [output], nodes=[node], opset_imports={"": 20}), ir_version=10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("fc_norm", ["none", "whole", "each"])
def test_fusing_is_that_of_the_head(fc_norm: FcNorm, dtype: torch.dtype, target: Any) -> None:
    head = random_head(head_config(variant=HeadVariant(TAPS, fc_norm)), target)
    cast_weights(head, dtype)
    graph = append_fusing(hidden_states(dtype), head)
    (output,) = graph.graph.outputs
    assert (output.name, output.shape) == (FEATURES, ir.Shape(["width", SIZE]))
    session = ort.InferenceSession(ir.to_proto(graph).SerializeToString(), providers=["CPUExecutionProvider"])
    rows = torch.randn(5, 3 * SIZE, generator=torch.Generator().manual_seed(1)).mul(3).to(dtype)
    (found,) = session.run(None, {"given": rows.numpy()})
    with torch.no_grad():
        expected = head.fuse(rows).numpy()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
