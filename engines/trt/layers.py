"""The layers of an engine, as TensorRT-RTX's builder lists them in its log. Its engine inspector needs a GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

_LAYERS, _SCRATCH, _WEIGHTS = "Layers:", "Total Activation Memory", "Total Weights Memory"
LISTING = (_LAYERS, _SCRATCH, _WEIGHTS)  # how the messages begin that ``layers_in`` reads
# Of activations; stored weights may have others, which no copy has.
_ITEM_BYTES = {"Float": 4, "Half": 2, "BFloat16": 2, "Int64": 8, "Int32": 4, "Int8": 1, "Bool": 1}
_TENSOR = re.compile(r"\{ Name: ([^,]+), Dimensions: \[([-\d,]*)\],[^}]*?Datatype: (\w+)")
_LAYER = re.compile(
    r"^Name: (.*?_myl(\d+)_\d+), LayerType: .*?Inputs: \[(.*)\], Constants: .*Outputs: \[(.*)\], Tactic"
)
_PADDING = 64  # kernels may want the capacity rounded up


@dataclass(frozen=True)
class LayerTensor:
    """A tensor that a layer reads or writes. A dimension that changes from pass to pass is -1."""

    name: str
    shape: tuple[int, ...]
    item_bytes: int

    def num_items(self, width: int) -> int:
        """Its items in a pass of ``width`` tokens, one of its dimensions being the width at most."""
        return prod(width if size < 0 else size for size in self.shape)


@dataclass(frozen=True)
class Layer:
    """One kernel of an engine, or a wait between streams, which has no tensors."""

    name: str
    inputs: tuple[LayerTensor, ...]
    outputs: tuple[LayerTensor, ...]


@dataclass(frozen=True)
class EngineLayers:
    """What the builder reports: the bytes of all weights, and by profile the layers and the bytes of scratch memory."""

    weights_bytes: int
    layers: Mapping[str, tuple[Layer, ...]]
    scratch_bytes: Mapping[str, int]


def layers_in(messages: Sequence[str], profiles: Sequence[str]) -> EngineLayers | None:
    """The engine that ``messages`` describe, built for ``profiles``; None if they do not."""
    listing = next((message for message in messages if message.startswith(_LAYERS)), None)
    scratch, weights = _numbers(messages, _SCRATCH), _numbers(messages, _WEIGHTS)
    if listing is None or len(scratch) != len(profiles) or not weights:
        return None
    layers: dict[str, list[Layer]] = {name: [] for name in profiles}
    for found in filter(None, map(_LAYER.match, listing.splitlines())):
        name, number, inputs, outputs = found.groups()
        if int(number) < len(profiles):
            layers[profiles[int(number)]].append(Layer(name, _tensors(inputs), _tensors(outputs)))
    if not all(layers.values()):
        return None
    return EngineLayers(
        weights[-1],
        {name: tuple(found) for name, found in layers.items()},
        dict(zip(profiles, scratch, strict=True)),
    )


def cache_copies(layers: Sequence[Layer], capacity: int, head_dim: int) -> list[LayerTensor]:
    """What ``layers`` write that has the size of a head's keys at full capacity or more, except in place."""
    return [
        tensor
        for layer in layers
        for tensor in layer.outputs
        if tensor.name not in {read.name for read in layer.inputs}
        and any(capacity <= size < capacity + _PADDING for size in tensor.shape)
        and tensor.num_items(1) >= capacity * head_dim
    ]


def copied_bytes(copies: Sequence[LayerTensor], width: int) -> int:
    """Bytes that a pass of ``width`` tokens writes as ``copies``."""
    return sum(tensor.num_items(width) * tensor.item_bytes for tensor in copies)


def _tensors(text: str) -> tuple[LayerTensor, ...]:
    return tuple(
        LayerTensor(name, tuple(int(size) for size in sizes.split(",") if size), _ITEM_BYTES.get(kind, 0))
        for name, sizes, kind in _TENSOR.findall(text)
    )


def _numbers(lines: Sequence[str], label: str) -> list[int]:
    return [int(line.split()[-2]) for line in lines if line.startswith(label)]
