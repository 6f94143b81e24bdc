"""Trace one layer of each kind; copy its nodes for the other layers, with their weights.

The cost of a trace depends on the number of layers, not on their size. Each traced layer is placed between two
markers, nodes that no optimization can see through. A layer's nodes are then those that depend on inputs that only it
reads: the marked input, its weights and its KV. All other nodes are shared.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import NameFixPass
from onnx_ir.tensor_adapters import TorchTensor

from specrt.engines.contract import FEATURES, ModelSpec, TensorSpec, model_contract, past_name, present_name
from specrt.exporter.heads.taps import concatenated
from specrt.exporter.passes.graph import copy_nodes
from specrt.exporter.tracing.kinds import layer_hooks

MARKER_DOMAIN = "specrt_layer"
_ENTER, _LEAVE = "Enter", "Leave"
_PARTS = ("key", "value")
_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


class CannotStamp(Exception):
    """A layer's nodes cannot be separated from the rest; the whole model must be traced."""


@contextmanager
def marked(layers: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Put a marker before and after each of ``layers`` while the model is traced."""

    def mark(op_type: str) -> Any:
        def apply(index: int, hidden: torch.Tensor) -> torch.Tensor:
            return torch.onnx.ops.symbolic(
                f"{MARKER_DOMAIN}::{op_type}", [hidden], {"layer": index}, dtype=hidden.dtype, shape=hidden.shape,
                version=1,
            )  # fmt: skip

        return apply

    with layer_hooks(layers, mark(_ENTER), mark(_LEAVE)):
        yield


@dataclass
class _Traced:
    """One layer of a traced graph."""

    enter: ir.Node
    leave: ir.Node
    weights: dict[str, ir.Value]  # by their names in the layer
    past: list[ir.Value]
    present: list[ir.Value]
    nodes: list[ir.Node]


class Stamp:
    """The traced layers of ``model``, whose weights are named ``place.0.``, ``place.1.`` and so on.

    The weights of layers are made graph inputs first, so that no optimization can fold what differs by layer.
    """

    def __init__(self, model: ir.Model, place: str, num_traced: int) -> None:
        self._model, self._place = model, place
        self._weights: list[dict[str, ir.Value]] = [{} for _ in range(num_traced)]
        for name, value in list(model.graph.initializers.items()):
            number, _, rest = name.removeprefix(f"{place}.").partition(".")
            if name.startswith(f"{place}.") and number.isdigit():
                del model.graph.initializers[name]
                value.const_value = None
                model.graph.inputs.append(value)
                self._weights[int(number)][rest] = value

    def apply(
        self, kinds: Sequence[int], layers: Sequence[torch.nn.Module], spec: ModelSpec, taps: Sequence[int] = ()
    ) -> ir.Model:
        """Build the graph of all ``layers`` with the contract of ``spec``; ``kinds`` has the traced layer of each.

        The features are the hidden values between the layers that ``taps`` names. Raises ``CannotStamp``.
        """
        graph = self._model.graph
        traced = self._traced_layers()
        inputs = {str(value.name): value for value in graph.inputs}
        outputs = {str(value.name): value for value in graph.outputs}
        hidden = traced[0].enter.inputs[0]
        assert hidden is not None
        between = [hidden]
        for index, kind in enumerate(kinds):
            source = traced[kind]
            mapping = {source.enter.outputs[0]: hidden, **self._weights_of(source, layers[index], index)}
            for part, past in zip(_PARTS, source.past, strict=True):
                mapping[past] = inputs[past_name(part, index)] = ir.Value(
                    name=past_name(part, index), shape=past.shape, type=past.type
                )
            graph.extend(copy_nodes(source.nodes, mapping))
            for part, present in zip(_PARTS, source.present, strict=True):
                outputs[present_name(part, index)] = mapping[present]
            end = source.leave.inputs[0]
            assert end is not None
            hidden = mapping.get(end, end)
            between.append(hidden)
        if taps:
            outputs[FEATURES] = concatenated(self._model, [between[tap] for tap in taps])
        contract = model_contract(spec)
        _set(graph.outputs, contract.outputs, outputs)
        ir.convenience.replace_all_uses_with(traced[-1].leave.outputs[0], hidden)
        for layer in reversed(traced):
            graph.remove([layer.leave, *reversed(layer.nodes), layer.enter], safe=True)
        _set(graph.inputs, contract.inputs, inputs)
        graph.opset_imports.pop(MARKER_DOMAIN, None)
        graph.sort()
        NameFixPass()(self._model)
        return self._model

    def _weights_of(self, source: _Traced, layer: torch.nn.Module, index: int) -> dict[ir.Value, ir.Value]:
        """The initializers of ``layer``, by the values of the traced layer that they replace."""
        mapping = {}
        for rest, value in source.weights.items():
            if not value.uses():
                continue
            name = f"{self._place}.{index}.{rest}"
            tensor = TorchTensor(operator.attrgetter(rest)(layer), name=name)
            new = ir.Value(name=name, shape=value.shape, type=value.type, const_value=tensor)
            self._model.graph.register_initializer(new)
            mapping[value] = new
        return mapping

    def _traced_layers(self) -> list[_Traced]:
        """Find each layer's nodes by what they depend on."""
        graph = self._model.graph
        inputs = {str(value.name): value for value in graph.inputs}
        outputs = {str(value.name): value for value in graph.outputs}
        markers = {(n.op_type, n.attributes["layer"].as_int()): n for n in graph if n.domain == MARKER_DOMAIN}
        traced = []
        for number, weights in enumerate(self._weights):
            if any((side, number) not in markers for side in (_ENTER, _LEAVE)):
                raise CannotStamp(f"layer {number} is not run once")
            past = [inputs[past_name(part, number)] for part in _PARTS]
            present = [outputs[present_name(part, number)] for part in _PARTS]
            enter, leave = markers[_ENTER, number], markers[_LEAVE, number]
            traced.append(_Traced(enter, leave, weights, past, present, []))
        owners = {
            value: number
            for number, layer in enumerate(traced)
            for value in (layer.enter.outputs[0], *layer.weights.values(), *layer.past)
        }
        for node in graph:
            found = {owners[value] for value in node.inputs if value in owners}
            if node.domain == MARKER_DOMAIN or not found:
                continue
            if len(found) > 1 or any(a.type in _GRAPHS for a in node.attributes.values()):
                raise CannotStamp(f"{node.op_type} reads from several layers")
            (number,) = found
            traced[number].nodes.append(node)
            owners.update(dict.fromkeys(node.outputs, number))
        for number, layer in enumerate(traced):
            _check_closed(layer, number)
        return traced


def _check_closed(layer: _Traced, number: int) -> None:
    """Raise ``CannotStamp`` unless only the layer itself, its marker and its KV outputs read the layer's values."""
    inside = {*layer.nodes, layer.leave}
    for node in layer.nodes:
        for value in node.outputs:
            if any(user not in inside for user in value.consumers()):
                raise CannotStamp(f"layer {number} is read from outside")
            if value.is_graph_output() and value not in layer.present:
                raise CannotStamp(f"layer {number} has an output of its own")


def _set(values: Any, tensors: Sequence[TensorSpec], found: dict[str, ir.Value]) -> None:
    """Set the graph's inputs or outputs to those of the contract, with its names and in its order."""
    new = [found[tensor.name] for tensor in tensors]
    values.clear()
    for value, tensor in zip(new, tensors, strict=True):
        value.name = tensor.name
        values.append(value)
