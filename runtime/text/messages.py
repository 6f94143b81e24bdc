"""Chat messages and chat template options, checked and converted to plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as short_repr
from typing import Any

import numpy as np

from specrt.engines.errors import UsageError

REASONING = ("reasoning_content", "thinking", "reasoning")  # the names under which templates read it
# Variables of a template that have their own options.
_OWN_OPTIONS = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_name")
_DEFAULTS: dict[str, Any] = {"documents": None}


@dataclass(frozen=True)
class ChatOptions:
    """How messages become text. Raises ``UsageError`` for a wrong value or combination.

    * ``chat_template_kwargs``: variables of the template, like the keyword arguments of transformers'
      ``apply_chat_template``. The options below may also be given in it.
    * ``tools``: JSON schemas of functions.
    * ``add_generation_prompt``: end with the beginning of an answer; by default unless a message is continued.
    * ``continue_final_message``: leave the last message open, or the field of it that is named.
    * ``chat_template_name``: which one, where the model has several.
    """

    chat_template_kwargs: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | str = False
    chat_template_name: str | None = None
    variables: Mapping[str, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        variables = _checked_kwargs(self.chat_template_kwargs)
        for name in _OWN_OPTIONS:
            if name in variables:
                if getattr(self, name) not in (None, False):
                    raise UsageError(f"{name}: got it in chat_template_kwargs too; give it once")
                object.__setattr__(self, name, variables.pop(name))
        self._check_kinds()
        if self.add_generation_prompt and self.continued_field:
            raise UsageError(
                "add_generation_prompt: got continue_final_message too, which leaves the last message open; give one"
            )
        adds = not self.continued_field if self.add_generation_prompt is None else self.add_generation_prompt
        variables["tools"] = _checked_dicts("tools", self.tools, "JSON schemas of functions")
        variables["documents"] = _checked_dicts("documents", variables["documents"], "{'title', 'text'}")
        object.__setattr__(self, "variables", {**variables, "add_generation_prompt": adds})

    def _check_kinds(self) -> None:
        kinds: tuple[tuple[str, type | tuple[type, ...], str], ...] = (
            ("add_generation_prompt", (bool, type(None)), "True, False or None"),
            ("continue_final_message", (bool, str), "True, False or the name of a field"),
            ("chat_template_name", (str, type(None)), "a name"),
        )
        for name, kind, expected in kinds:
            if not isinstance(getattr(self, name), kind):
                raise UsageError(f"{name}: got {short_repr(getattr(self, name))}, expected {expected}")

    @property
    def continued_field(self) -> str:
        """The field of the last message that is left open; empty if none is."""
        continued = self.continue_final_message
        return continued if isinstance(continued, str) else "content" if continued else ""

    @property
    def given(self) -> str | None:
        """The first option that was given; None if none was."""
        names = [f.name for f in dataclasses.fields(self) if f.init and getattr(self, f.name) not in (None, False)]
        return names[0] if names else None


def _checked_kwargs(given: Any) -> dict[str, Any]:
    if given is None:
        return dict(_DEFAULTS)
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise UsageError(f"chat_template_kwargs: got {short_repr(given)}, expected {{name: value}}")
    if "messages" in given:
        raise UsageError("chat_template_kwargs: got messages, expected other variables; pass messages as the prompt")
    return {**_DEFAULTS, **{str(name): _plain_variable(name, value) for name, value in given.items()}}


def _plain_variable(name: str, value: Any) -> Any:
    try:
        return plain(value)
    except (TypeError, RecursionError) as error:
        raise UsageError(f"{name}: {error}; expected text, numbers, lists and dicts of them") from error


def _checked_dicts(name: str, value: Any, kind: str) -> list[Any] | None:
    """A list of dicts as plain data; None stays None."""
    if value is None:
        return None
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise UsageError(f"{name}: got {short_repr(value)}, expected a list of {kind}; put a single one in brackets")
    if wrong := [item for item in value if not isinstance(item, Mapping)]:
        raise UsageError(f"{name}: got {short_repr(wrong[0])} in the list, expected {kind}")
    return [_plain_variable(name, item) for item in value]


def is_message(item: Any) -> bool:
    """Whether ``item`` may be a message: a mapping, or an object that ``plain`` converts to one."""
    is_object = dataclasses.is_dataclass(item) and not isinstance(item, type)
    return isinstance(item, Mapping) or is_object or callable(getattr(item, "model_dump", None))


def checked_message(item: Any, index: int) -> dict[str, Any]:
    """A message as plain data, without keys of value None, and with reasoning under each name that templates read."""
    try:
        message = {key: value for key, value in plain(item).items() if value is not None}
        bodies = [message[name] for name in ("content", "tool_calls", *REASONING) if name in message]
        if not (isinstance(message["role"], str) and bodies and isinstance(bodies[0], str | list)):
            raise TypeError("no role or no content")
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"prompt: message {index} is {short_repr(item)}, expected a role and a content; "
            "write it like {'role': 'user', 'content': 'text'}"
        ) from error
    for name in REASONING:
        if name in message:
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return message


def plain(value: Any) -> Any:
    """``value`` as scalars, lists, tuples and dicts only, which have no methods that write or run something.

    Dataclasses and objects with ``model_dump``, such as the messages of other libraries, become dicts, and numpy
    scalars become Python numbers. Raises ``TypeError`` for other types.
    """
    if value is None or isinstance(value, bool):
        return value
    for kind, plainly in _SCALARS:
        if isinstance(value, kind):
            return plainly(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        return plain(dump())
    if isinstance(value, np.generic):
        return plain(value.item())
    raise TypeError(f"got {type(value).__name__}, which a chat template cannot see")


# Converts an object of a subclass, such as an enum of strings, to the class itself.
_SCALARS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
)
