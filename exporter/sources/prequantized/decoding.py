"""A checkpoint of quantized weights, read as float weights under the names of the float model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from specrt.engines.errors import SourceError, one_line
from specrt.exporter.sources.checkpoint import Checkpoint

WEIGHT = "weight"


@dataclass(frozen=True)
class Format:
    """How one method stores a linear module's weight.

    ``parts``: the names, below the module's, of the tensors of a weight; ``optional``: those that may be absent;
    ``dropped``: those that float weights do not need, such as scales of activations. ``decode`` returns the weight
    [N, K] f32 of a module (its name, its parts), and raises ``ValueError`` when the parts do not fit together.
    """

    name: str
    parts: tuple[str, ...]
    optional: tuple[str, ...]
    decode: Callable[[str, Mapping[str, torch.Tensor]], torch.Tensor]
    dropped: tuple[str, ...] = ()


class DecodedCheckpoint:
    """The float tensors of ``stored``. ``is_transposed`` is true for a module whose weight is kept as [K, N]."""

    def __init__(self, stored: Checkpoint, form: Format, is_transposed: Callable[[str], bool]) -> None:
        self._stored, self._form, self._is_transposed = stored, form, is_transposed
        parts: dict[str, list[str]] = {}
        self._plain: list[str] = []
        for name in stored.names():
            module, part = _split(name, (*form.parts, *form.optional, *form.dropped))
            if part is None:
                self._plain.append(name)
            elif part not in form.dropped:
                parts.setdefault(module, []).append(part)
        self._quantized = {module: found for module, found in parts.items() if set(found) != {WEIGHT}}
        self._plain += [f"{module}.{WEIGHT}" for module in parts.keys() - self._quantized.keys()]
        for module, found in self._quantized.items():
            if missing := [part for part in form.parts if part not in found]:
                raise SourceError(
                    f"{module}.{missing[0]} is missing, got {module}.{found[0]}: a {form.name} weight is made of "
                    f"{', '.join(form.parts)}; download the model again, or export the one that it was made from"
                )
        if not self._quantized:
            raise SourceError(
                f"the config states {form.name}, and no tensor of the files has such parts ({', '.join(form.parts)}); "
                "remove quantization_config from config.json if the weights are floats"
            )

    def names(self) -> Sequence[str]:
        return tuple(sorted([*self._plain, *(f"{module}.{WEIGHT}" for module in self._quantized)]))

    def read(self, name: str) -> torch.Tensor:
        module = name.removesuffix(f".{WEIGHT}")
        if name == module or module not in self._quantized:
            return self._plain_tensor(name)
        parts = {part: self._stored.read(f"{module}.{part}") for part in self._quantized[module]}
        try:
            weight = self._form.decode(module, parts)
        except (ValueError, IndexError, RuntimeError, KeyError, TypeError) as error:  # what damaged parts can raise
            line = one_line(error)
            raise SourceError(f"{module}: not a whole {self._form.name} weight ({line}); download it again") from error
        if not torch.isfinite(weight).all():
            raise SourceError(f"{module}: its {self._form.name} weight is not finite; the file is damaged")
        return (weight.T if self._is_transposed(module) else weight).contiguous()

    def _plain_tensor(self, name: str) -> torch.Tensor:
        tensor = self._stored.read(name)
        if name.endswith(f".{WEIGHT}") and tensor.element_size() == 1:
            raise SourceError(
                f"{name} is stored as {str(tensor.dtype).removeprefix('torch.')} without its scales; download the "
                "model again, or export the one that it was made from"
            )
        return tensor


def _split(name: str, parts: Sequence[str]) -> tuple[str, str | None]:
    """(module, part), the longest part that fits; (name, None) for a tensor that is none."""
    fitting = [part for part in parts if name.endswith(f".{part}")]
    if not fitting:
        return name, None
    part = max(fitting, key=len)
    return name[: -len(part) - 1], part
