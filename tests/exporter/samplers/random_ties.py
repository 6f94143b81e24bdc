"""Graphs whose ArgMax and TopK return any of equal values, as on devices. ONNX specifies the first."""

from __future__ import annotations

import secrets
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

_CHOOSING = {"ArgMax": 0, "ArgMin": 0, "TopK": 1}  # operator: which of its outputs are indices


def as_a_device_would(graph: str) -> str | bytes:
    """The graph in a file, for a session: a sampler's with ties broken at random, a model's as it is."""
    if "samplers" not in Path(graph).parts[-3:-1]:
        return graph
    model: bytes = with_random_ties(onnx.load(graph), secrets.randbits(32)).SerializeToString()
    return model


def with_random_ties(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """``model`` with the columns permuted before each ArgMax and TopK, and its indices put back.

    Over an axis whose length is not known, ArgMax takes the last of equals.
    """
    inferred = onnx.shape_inference.infer_shapes(model)
    lengths = {
        value.name: value.type.tensor_type.shape.dim
        for value in (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output)
    }
    copy, rng, nodes = onnx.ModelProto(), np.random.default_rng(seed), []
    copy.CopyFrom(model)
    for node in copy.graph.node:
        if node.op_type not in _CHOOSING:
            nodes.append(node)
            continue
        axis = next((a.i for a in node.attribute if a.name == "axis"), -1)
        length = lengths[node.input[0]][axis].dim_value
        if not length:
            assert node.op_type != "TopK"
            node.attribute.append(helper.make_attribute("select_last_index", 1))
            nodes.append(node)
            continue
        name, place = f"{node.name}.order", _CHOOSING[node.op_type]
        copy.graph.initializer.append(numpy_helper.from_array(rng.permutation(length), name))
        nodes.append(helper.make_node("Gather", [node.input[0], name], [f"{name}.in"], axis=axis))
        found = node.output[place]
        node.input[0], node.output[place] = f"{name}.in", f"{name}.out"
        nodes += [node, helper.make_node("Gather", [name, f"{name}.out"], [found])]
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    onnx.checker.check_model(copy)
    return copy
