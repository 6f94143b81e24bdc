"""JSON to frozen dataclasses and back, strictly: unknown and missing keys are errors, types are checked."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Plain lists, dicts and scalars from a (nested) dataclass."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value


def from_json(kind: type[T], data: Any, where: str = "") -> T:
    """A ``kind`` from parsed JSON. Raises ``ValueError`` that names the place of the error."""
    return _decode(kind, data, where or kind.__name__)  # type: ignore[no-any-return]


def _decode(kind: Any, data: Any, where: str) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, data, where)
    if origin in (Union, types.UnionType):
        return _decode_union(args, data, where)
    if origin is tuple:
        _expect(data, list, where)
        return tuple(_decode(args[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin is dict:
        _expect(data, dict, where)
        return {key: _decode(args[1], item, f"{where}.{key}") for key, item in data.items()}
    if kind is float and type(data) is int:
        return float(data)
    _expect(data, kind, where)
    return data


def _decode_dataclass(kind: Any, data: Any, where: str) -> Any:
    _expect(data, dict, where)
    hints = get_type_hints(kind)
    names = {f.name for f in dataclasses.fields(kind)}
    if unknown := sorted(set(data) - names):
        raise ValueError(f"{where}: unknown key {unknown[0]!r}")
    if missing := sorted(names - set(data)):
        raise ValueError(f"{where}: key {missing[0]!r} is missing")
    return kind(**{name: _decode(hints[name], data[name], f"{where}.{name}") for name in names})


def _decode_union(args: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in args:
        return None
    errors = []
    for option in args:
        if option is type(None):
            continue
        try:
            return _decode(option, data, where)
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _expect(data: Any, kind: Any, where: str) -> None:
    if type(data) is not kind:
        raise ValueError(f"{where}: got {type(data).__name__}, expected {kind.__name__}")
