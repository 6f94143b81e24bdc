"""The JSON of a request, and the fields of its objects, taken one by one. Fields left at the end are unknown."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from reprlib import repr as short_repr
from typing import Any

from specrt.serving.protocol.errors import ApiError, invalid


def parsed(data: bytes) -> Any:
    """The value of JSON text. Raises ``ValueError``, ``RecursionError``, and ``ApiError`` for a repeated name."""
    return json.loads(data, parse_constant=_refuse_constant, object_pairs_hook=_object)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set[str]()
        for name, _ in pairs:
            if name in seen:
                raise invalid(name, "got it twice; give it once")
            seen.add(name)
    return found


class Fields:
    """Takes fields of ``body``. ``null`` counts as absent. Raises ``ApiError`` for a wrong value.

    ``path`` is the position of ``body`` in the request, such as ``messages[0]``.
    """

    def __init__(self, body: Any, path: str = "") -> None:
        self.path = path
        if not isinstance(body, dict):
            what = path or "the body"
            raise ApiError(400, f"{what}: got {short_repr(body)}, expected an object", path or None)
        self._left: dict[str, Any] = dict(body)

    def name(self, field: str) -> str:
        """The path of ``field``."""
        return f"{self.path}.{field}" if self.path else field

    def take(self, field: str) -> Any:
        """The value of a field, or None."""
        return self._left.pop(field, None)

    def wrong(self, field: str, value: Any, expected: str) -> ApiError:
        """The error for a value."""
        return invalid(self.name(field), f"got {short_repr(value)}, expected {expected}")

    def of_kind(self, field: str, kind: type | tuple[type, ...], expected: str) -> Any:
        """A value of a type, or None."""
        value = self.take(field)
        is_bool = isinstance(value, bool) and kind is not bool
        if value is not None and (is_bool or not isinstance(value, kind)):
            raise self.wrong(field, value, expected)
        return value

    def flag(self, field: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.of_kind(field, bool, "true or false")
        return default if value is None else value

    def text(self, field: str) -> str | None:
        """A string."""
        value: str | None = self.of_kind(field, str, "a string")
        return value

    def whole(self, field: str, low: int, high: int | None = None) -> int | None:
        """A whole number from ``low`` to ``high``."""
        limits = f"{low} or more" if high is None else f"from {low} to {high}"
        value: int | None = self.of_kind(field, int, f"a whole number, {limits}")
        if value is not None and (value < low or (high is not None and value > high)):
            raise self.wrong(field, value, f"a whole number, {limits}")
        return value

    def one_of(self, field: str, choices: Collection[Any]) -> Any:
        """One of ``choices``, which are of one type, or None."""
        value = self.take(field)
        if value is not None and not (type(value) in set(map(type, choices)) and value in choices):  # 0 is not False
            raise self.wrong(field, value, " or ".join(map(repr, choices)))
        return value

    def objects(self, field: str) -> list[Fields] | None:
        """A list of objects, each as fields."""
        values = self.of_kind(field, list, "a list of objects")
        if values is None:
            return None
        return [Fields(value, f"{self.name(field)}[{index}]") for index, value in enumerate(values)]

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Raise for fields that are not supported, with the reason."""
        for field, reason in reasons.items():
            if (value := self.take(field)) is not None:
                raise invalid(self.name(field), f"got {short_repr(value)}, but {reason}", "unsupported_parameter")

    def end(self) -> None:
        """Raise for fields that were not taken."""
        for field in self._left:
            raise invalid(self.name(field), "unknown field; leave it out", "unknown_parameter")
