"""TensorRT's modules of three versions, as far as names go: read from the bindings of 10.13, 10.16.1 and 11.0.0.

Attention and KV cache updates come with 10.15; ``causal_kind`` is added to ``causal`` in 11.0. The libraries themselves
need a GPU and 3 GB; TensorRT-RTX, which other tests use, has the names of 11.0.
"""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

VERSIONS = ("10.13.3", "10.16.1", "11.0.0")


class CausalMaskKind(Enum):
    NONE, UPPER_LEFT, LOWER_RIGHT = range(3)


class IAttentionInputLayer:
    """Layers come as ``ILayer``; ``attention`` exists once the class is set."""

    @property
    def attention(self) -> Any:
        return self.__dict__["of"]


class ICudaEngine:
    device_memory_size_v2 = 0

    def get_aliased_input_tensor(self, name: str) -> str | None: ...


def module(version: str) -> Any:
    """What ``import tensorrt`` gives in ``version``."""
    major, minor = (int(part) for part in version.split(".")[:2])
    has_attention = (major, minor) >= (10, 15)
    layers = ("SHUFFLE", *(("ATTENTION_INPUT", "KV_CACHE_UPDATE") if has_attention else ()))
    found = SimpleNamespace(
        __name__="tensorrt",
        __version__=version,
        LayerType=Enum("LayerType", layers),
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED=2),
        ICudaEngine=ICudaEngine,
    )
    if has_attention:
        found.IAttentionInputLayer = IAttentionInputLayer
    if major >= 11:
        found.CausalMaskKind = CausalMaskKind
    return found


class Layer:
    """A layer of a parsed network, by the names of its tensors."""

    def __init__(self, kind: Any, inputs: list[str], output: str, **of: Any) -> None:
        self.type, self.name, self._inputs, self._output = kind, kind.name.lower(), inputs, output
        self.of = SimpleNamespace(**of)
        self.num_inputs = len(inputs)

    def get_input(self, index: int) -> Any:
        return SimpleNamespace(name=self._inputs[index])

    def get_output(self, index: int) -> Any:
        return SimpleNamespace(name=self._output)


class Network:
    """Inputs and outputs as (name, dtype, shape), and layers."""

    def __init__(self, inputs: list[Any], outputs: list[Any], layers: list[Layer]) -> None:
        self._inputs, self._outputs, self._layers = inputs, outputs, layers
        self.num_inputs, self.num_outputs, self.num_layers = len(inputs), len(outputs), len(layers)

    def get_input(self, index: int) -> Any:
        return self._inputs[index]

    def get_output(self, index: int) -> Any:
        return self._outputs[index]

    def get_layer(self, index: int) -> Layer:
        return self._layers[index]
