"""Checks of option values. Each returns the value to store, or raises ``UsageError`` that names the option."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from reprlib import repr as short_repr
from typing import Any

import numpy as np

from specrt.engines.errors import UsageError
from specrt.runtime.text.messages import ChatOptions
from specrt.runtime.text.stops import checked_stops

MAX_BIAS = 1e4


def number(name: str, value: Any, low: float, high: float = float("inf"), whole: bool = False) -> int | float:
    """``value`` as a Python number; numpy scalars are accepted."""
    is_number = isinstance(value, Integral) or (isinstance(value, Real) and not whole)
    if not is_number or isinstance(value, bool) or not low <= value <= high:
        kind = "a whole number" if whole else "a number"
        limits = f"from {low} to {high}" if high != float("inf") else f"of {low} or more"
        raise UsageError(f"{name}: got {short_repr(value)}, expected {kind} {limits}")
    return int(value) if isinstance(value, Integral) else float(value)


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise UsageError(f"{name}: got {short_repr(value)}, expected True or False")
    return bool(value)


def choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise UsageError(f"{name}: got {short_repr(value)}, expected one of {', '.join(choices)}")
    return str(value)


def penalty_factor(name: str, value: Any) -> int | float:
    """A number above 0, up to 100."""
    factor = number(name, value, 0, 100)
    if factor == 0:
        raise UsageError(f"{name}: got {short_repr(value)}, expected more than 0; 1 is neutral")
    return factor


def token_ids(name: str, value: Any) -> tuple[Any, ...]:
    """As a tuple. Whether they are in the vocabulary is checked later."""
    return tuple(map(_plain, _several(name, value, "token ids")))


def texts(name: str, value: Any) -> tuple[str, ...]:
    """As a tuple."""
    found = _several(name, value, "texts")
    if wrong := [text for text in found if not isinstance(text, str)]:
        raise UsageError(f"{name}: got {short_repr(wrong[0])}, expected strings")
    return found


def biases(name: str, value: Any) -> dict[Any, float] | None:
    """By token id."""
    if not isinstance(value, Mapping):
        raise UsageError(f"{name}: got {type(value).__name__}, expected {{token id: bias}}")
    return {_plain(token_id): number(name, bias, -MAX_BIAS, MAX_BIAS) for token_id, bias in value.items()} or None


def processors(name: str, value: Any) -> tuple[Any, ...]:
    """Callables, as a tuple."""
    expected = "callables (token_ids, logits)"
    found = _several(name, value, expected)
    if wrong := [processor for processor in found if not callable(processor)]:
        raise UsageError(f"{name}: got {short_repr(wrong[0])}, expected {expected}")
    return found


def stops(name: str, value: Any) -> tuple[str, ...]:
    """See ``checked_stops``."""
    return checked_stops(value)


def of_template(name: str, value: Any) -> Any:
    """An option of the chat template; see ``ChatOptions``."""
    return getattr(ChatOptions(**{name: value}), name)


def _plain(token_id: Any) -> Any:
    """A numpy integer as a Python ``int``; other values unchanged."""
    if isinstance(token_id, bool):  # bool is an Integral, but here it is a mistake
        return token_id
    return int(token_id) if isinstance(token_id, Integral) else token_id


def _several(name: str, value: Any, kind: str) -> tuple[Any, ...]:
    """The items as a tuple. An iterator can be read only once."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise UsageError(f"{name}: got {short_repr(value)}, expected a list of {kind}; put a single one in brackets")
    return tuple(value)
