"""The layers of an engine, as TensorRT-RTX's builder lists them. Its engine inspector needs a GPU; this does not."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from specrt.engines.contract import WIDTH, Contract
from specrt.engines.trt.network import parse
from specrt.engines.trt.profiles import Profile, shapes_of

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
    """What the builder reports: sizes in bytes, and by profile its layers and its scratch memory."""

    num_bytes: int
    weights_bytes: int
    layers: Mapping[str, tuple[Layer, ...]]
    scratch_bytes: Mapping[str, int]


def engine_layers(graph: Path, contract: Contract, profiles: Mapping[str, Profile]) -> EngineLayers:
    """Build the file ``graph`` with TensorRT-RTX for ``profiles`` and list its layers; the engine is dropped.

    Raises ``BackendError`` for a graph that cannot be read, ``RuntimeError`` with the builder's message for one that
    cannot be built.
    """
    import tensorrt_rtx as trt

    logger = _logger(trt)
    builder = trt.Builder(logger)
    network = parse(trt, builder, logger, graph)
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    for sizes in profiles.values():
        profile = builder.create_optimization_profile()
        for name, shapes in shapes_of(contract, sizes).items():
            profile.set_shape(name, *shapes)
        config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise RuntimeError(f"{graph}: {logger.errors[0] if logger.errors else 'no reason given'}")
    return _listed(plan.nbytes, logger.lines, list(profiles))


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


def profile_width(profile: Profile) -> int:
    """The widest pass of a profile."""
    return profile[WIDTH][-1]


def _logger(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.lines: list[str] = []
            self.errors: list[str] = []
            self.warnings: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            self.lines.append(message)
            if severity <= trt.ILogger.ERROR:
                self.errors.append(" ".join(message.split()))

    return Logger()


def _listed(num_bytes: int, lines: Sequence[str], profiles: Sequence[str]) -> EngineLayers:
    listing = next(line for line in lines if line.startswith("Layers:"))
    layers: dict[str, list[Layer]] = {name: [] for name in profiles}
    for found in filter(None, map(_LAYER.match, listing.splitlines())):
        name, number, inputs, outputs = found.groups()
        layers[profiles[int(number)]].append(Layer(name, _tensors(inputs), _tensors(outputs)))
    scratch = dict(zip(profiles, _numbers(lines, "Total Activation Memory"), strict=True))
    weights = _numbers(lines, "Total Weights Memory")[-1]
    return EngineLayers(num_bytes, weights, {name: tuple(found) for name, found in layers.items()}, scratch)


def _tensors(text: str) -> tuple[LayerTensor, ...]:
    return tuple(
        LayerTensor(name, tuple(int(size) for size in sizes.split(",") if size), _ITEM_BYTES[kind])
        for name, sizes, kind in _TENSOR.findall(text)
    )


def _numbers(lines: Sequence[str], label: str) -> list[int]:
    return [int(line.split()[-2]) for line in lines if line.startswith(label)]
