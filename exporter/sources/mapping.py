"""The map from the tensors of a file to those of the loaded model, with the conversions.

Names that agree, with or without the base model's prefix, are matched here. All others go through transformers' own
table of renamings and conversions (merged experts, split projections). The table of GGUF files is in
``specrt.exporter.sources.gguf.mapping``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TensorMap:
    """``convert`` turns the file's tensors ``sources``, in this order, into the model's tensors ``targets`` by name.

    ``is_computed``: the values are computed (block formats), so another implementation may differ in the last bit.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    convert: Callable[[Sequence[torch.Tensor]], Tensors]
    is_computed: bool = False


@dataclass(frozen=True)
class FileMap:
    """The map of a whole file: ``maps`` of the tensors that the model reads; ``unread`` are the names of the others."""

    maps: tuple[TensorMap, ...]
    unread: tuple[str, ...]

    @property
    def targets(self) -> set[str]:
        return {target for row in self.maps for target in row.targets}


def unchanged(source: str, target: str) -> TensorMap:
    """A tensor that only changes its name."""
    return TensorMap((source,), (target,), lambda tensors: {target: tensors[0]})


def map_names(model: Any, names: Iterable[str]) -> FileMap:
    """The map from tensors ``names`` of safetensors or ``.bin`` files to ``model``, a transformers model."""
    state = model.state_dict()
    prefix = f"{model.base_model_prefix}." if model.base_model_prefix else ""
    maps: dict[str, TensorMap] = {}
    left = []
    for name in names:
        spellings = (name, name.removeprefix(prefix), prefix + name)
        target = next((spelling for spelling in spellings if spelling in state), None)
        if target is None or target in maps:
            left.append(name)
        else:
            maps[target] = unchanged(name, target)
    converted, unread = _map_by_conversions(model, state, left, maps)
    return FileMap((*maps.values(), *converted), tuple(unread))


def _map_by_conversions(
    model: Any, state: Mapping[str, Any], names: Iterable[str], taken: Mapping[str, TensorMap]
) -> tuple[list[TensorMap], list[str]]:
    """The maps of ``names`` by transformers' table of renamings and conversions, and the names that it lacks."""
    transforms = get_model_conversion_mapping(model, None, getattr(model, "hf_quantizer", None))
    renamings = [row for row in transforms if isinstance(row, WeightRenaming)]
    converters = [row for row in transforms if isinstance(row, WeightConverter)]
    converter_of = {pattern: row for row in converters for pattern in row.source_patterns}
    groups: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, dict(state))
        groups[target].append((name, pattern))
    maps, unread = [], []
    for target, members in groups.items():
        pattern = members[0][1]
        if target not in state or target in taken or (pattern is None and len(members) > 1):
            unread += [name for name, _ in members]
        elif pattern is None:
            maps.append(unchanged(members[0][0], target))
        else:
            maps.append(_converted(model, converter_of, state, target, [(n, p) for n, p in members if p is not None]))
    return maps, unread


def _converted(
    model: Any,
    converter_of: Mapping[str, Any],
    state: Mapping[str, Any],
    target: str,
    members: Sequence[tuple[str, str]],
) -> TensorMap:
    converter = converter_of[members[0][1]]

    def convert(tensors: Sequence[torch.Tensor]) -> Tensors:
        own = deepcopy(converter)
        for (name, pattern), tensor in zip(members, tensors, strict=True):
            own.add_tensor(target, name, pattern, tensor)
        made = own.convert(target, model=model, config=model.config, hf_quantizer=getattr(model, "hf_quantizer", None))
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    targets = _targets(converter.target_patterns, target, state)
    return TensorMap(tuple(name for name, _ in members), targets, convert, is_computed=_computes(converter))


def _targets(patterns: Sequence[str], first: str, state: Mapping[str, Any]) -> tuple[str, ...]:
    """All tensors that a conversion makes whose first one is ``first``."""
    found = {first}
    for pattern in patterns[1:]:
        found.add(first.replace(patterns[0], pattern))
    if "*" in patterns[0]:
        expression = re.compile(re.escape(patterns[0]).replace(r"\*", r"\d+"))
        any_number = re.compile(expression.sub(lambda _: expression.pattern, re.escape(first)))
        found |= {name for name in state if any_number.fullmatch(name)}
    return tuple(sorted(found & state.keys()))


def _computes(converter: Any) -> bool:
    """Whether a conversion computes values (dequantizes) instead of only moving them."""
    return any("quantize" in type(operation).__name__.lower() for operation in converter.operations)
