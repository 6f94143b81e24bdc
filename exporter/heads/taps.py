"""The hidden states of a target that a head reads: in torch, and as an output of the target's graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from specrt.engines.errors import UsageError
from specrt.engines.interface import Array
from specrt.exporter.cutting import place_of_layers
from specrt.exporter.passes.graph import add_initializer
from specrt.exporter.tracing.kinds import layer_hooks


def check_taps(option: str, taps: Sequence[int], num_layers: int) -> None:
    """Raise ``UsageError`` unless ``taps`` are indices of hidden states, in order."""
    if list(taps) != sorted(set(taps)) or not taps or taps[0] < 0 or taps[-1] > num_layers:
        shown = ",".join(map(str, taps))
        raise UsageError(
            f"{option} {shown}: expected ascending indices of hidden states, from 0 (the embeddings) to {num_layers} "
            f"(the output of the last of {num_layers} layers)"
        )


@contextmanager
def tapped(model: Any, taps: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Inside the block a pass of ``model`` stores the hidden states of ``taps`` [1, M, Ht] in the result, by tap.

    0 is the input of the first layer and ``i`` the output of layer ``i - 1``, also for the last one, which
    transformers normalizes first. Raises ``UnsupportedModelError`` if the layers are not in one list.
    """
    found: dict[int, torch.Tensor] = {}
    if not taps:
        yield found
        return

    def enter(index: int, hidden: torch.Tensor) -> torch.Tensor:
        if index == 0 and 0 in taps:
            found[0] = hidden
        return hidden

    def leave(index: int, hidden: torch.Tensor) -> torch.Tensor:
        if index + 1 in taps:
            found[index + 1] = hidden
        return hidden

    parent, name = place_of_layers(model)
    with layer_hooks(getattr(parent, name), enter, leave):
        yield found


def tapped_states(model: Any, ids: Array, taps: Sequence[int]) -> torch.Tensor:
    """The concatenated hidden states of ``taps`` over ``ids`` [N], by one pass of the torch model. [N, len(taps) Ht]"""
    with torch.no_grad(), tapped(model, taps) as found:
        model(input_ids=torch.from_numpy(ids)[None], use_cache=False)
    return torch.cat([found[tap][0] for tap in taps], dim=-1)


def concatenated(model: ir.Model, values: Sequence[ir.Value]) -> ir.Value:
    """``values`` [1, M, Ht] each, concatenated by new nodes at the end of the graph. [M, len(values) Ht]"""
    first = add_initializer(model, "features.first", np.array([0], np.int64))
    joined = ir.node("Concat", list(values), attributes={"axis": -1})
    rows = ir.node("Squeeze", [joined.outputs[0], first])
    rows.outputs[0].type = values[0].type
    model.graph.extend([joined, rows])
    return rows.outputs[0]
