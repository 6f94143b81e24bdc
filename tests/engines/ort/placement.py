"""Which nodes ONNX Runtime puts on the CPU although CUDA has kernels for them: its own rule, on a graph.

``GetCpuPreferredNodes`` of onnxruntime/core/framework/fallback_cpu_capability.cc: a node goes to the CPU if it reads
host output of a kernel (of Shape and Size), and all its other inputs are on the host too, are graph inputs, or are
initializers of at most 100 items. The CPU package has no CUDA provider: ``placed_nodes`` reads the log of one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

_LEAVE_ON_HOST = {"Shape", "Size"}
_SMALL = 100
# Inputs that CUDA's kernels read on the host themselves, by their positions
_READ_ON_HOST: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Expand", "Reshape", "Tile", "TopK", "Unsqueeze", "Squeeze", "CumSum"), (1,)),
    **dict.fromkeys(("ReduceSum", "ReduceMax", "ReduceMin", "ReduceMean"), (1,)),
    "Slice": (1, 2, 3, 4),
    "Pad": (1, 2, 3),
    "Range": (0, 1, 2),
    "ConstantOfShape": (0,),
}


_PLACED = re.compile(r"(?:All nodes|Node\(s\)) placed on \[(\w+)\]\. Number of nodes: (\d+)")


def placed_nodes(graph: Path | bytes, providers: Sequence[Any], capfd: Any) -> dict[str, int]:
    """How many nodes of ``graph`` each provider has, by ONNX Runtime's own log of a new session."""
    options = ort.SessionOptions()
    options.log_severity_level = 0
    capfd.readouterr()
    ort.InferenceSession(graph if isinstance(graph, bytes) else str(graph), options, providers=list(providers))
    return {provider: int(count) for provider, count in _PLACED.findall(capfd.readouterr().err)}


def nodes_on_host(model: onnx.ModelProto) -> list[str]:
    """The names of nodes that the CUDA provider gives away, in order; outputs of Shape itself stay its own."""
    small = {t.name for t in model.graph.initializer if prod(t.dims) <= _SMALL}
    small |= {node.output[0] for node in model.graph.node if node.op_type == "Constant"}
    free = small | {value.name for value in model.graph.input}
    on_host: set[str] = set()
    found = []
    for node in model.graph.node:  # ONNX keeps them in topological order
        if node.op_type in _LEAVE_ON_HOST:
            on_host |= set(node.output)
            continue
        inputs = [name for name in node.input if name]
        if not on_host & set(inputs):
            continue
        own = _READ_ON_HOST.get(node.op_type, ())
        is_given_away = all(
            name in free or (name in on_host and position not in own)
            for position, name in enumerate(node.input)
            if name
        )
        if is_given_away:
            found.append(f"{node.op_type} {node.name}")
            on_host |= set(node.output)
    return found
