"""One pass of a binding as a function: inputs by name in, outputs by name out."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from specrt.engines.contract import ROWS, WIDTH, Contract, TensorSpec
from specrt.engines.interface import Array, Binding


def infer(binding: Binding, contract: Contract, feed: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of ``contract`` that are no KV cache, after a pass over ``feed``, whose shapes are those of the pass.

    Inputs that ``feed`` does not name, a model's KV cache, stay as they are in the binding.
    """
    sizes = sizes_of(contract, feed)
    specs = {tensor.name: tensor for tensor in contract.inputs}
    for name, values in feed.items():
        binding.write(name, _padded(values, specs[name], contract))
    width, rows = sizes.get(WIDTH, 1), sizes[ROWS]
    binding.run(width, rows)
    cache = {written for written, _ in contract.swaps}
    outputs = [tensor for tensor in contract.outputs if tensor.alias is None and tensor.name not in cache]
    found = binding.read(*(tensor.name for tensor in outputs))
    shapes = [tensor.resolve({**contract.limits, **sizes}) for tensor in outputs]
    return {
        tensor.name: values[tuple(slice(size) for size in shape)].copy()
        for tensor, values, shape in zip(outputs, found, shapes, strict=True)
    }


def sizes_of(contract: Contract, feed: Mapping[str, Array]) -> dict[str, int]:
    """The symbolic dimensions of a pass over ``feed``, by the shapes of its arrays."""
    sizes: dict[str, int] = {}
    for tensor in contract.inputs:
        if tensor.name in feed:
            shape = feed[tensor.name].shape
            sizes |= {d: size for d, size in zip(tensor.shape, shape, strict=True) if isinstance(d, str)}
    return sizes


def _padded(values: Array, spec: TensorSpec, contract: Contract) -> Array:
    """All dimensions but the first as long as the memory has them; a pass uses the leading part."""
    full = spec.resolve(contract.limits)
    padding = [(0, 0), *((0, size - have) for size, have in zip(full[1:], values.shape[1:], strict=True))]
    return np.pad(values, padding)
