"""The end-of-sequence ids of a model: the union of those of its config, generation config and tokenizer."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from specrt.engines.errors import SourceError, kind_and_line
from specrt.exporter.sources.hub_files import optional_bytes

GENERATION_CONFIG = "generation_config.json"
_FIX = "correct it, or give the ends as numbers"
_DIGITS = re.compile(r"-?[0-9]{1,18}")
_LARGEST = sys.float_info.max  # JSON has integers beyond it


def eos_ids(config: Any, generation_config: Any, tokenizer: Any, vocab_size: int | None = None) -> tuple[int, ...]:
    """The sorted union of the end-of-sequence ids of a transformers config, generation config and tokenizer.

    Each may hold an id, several or none, as numbers or as strings of digits, and may itself be None. The config of the
    text model inside ``config`` counts too. Negative ids, which some configs use for none, are left out. Raises
    ``SourceError`` for anything else, and for an id that is not below ``vocab_size``.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    places = {"config": config, "text config": text, "generation config": generation_config, "tokenizer": tokenizer}
    found: set[int] = set()
    for place, holder in places.items():
        for token_id in _ids(getattr(holder, "eos_token_id", None), place):
            if vocab_size is not None and token_id >= vocab_size:
                raise SourceError(
                    f"{place}: eos_token_id {token_id} is outside the vocabulary of {vocab_size} ids; {_FIX}"
                )
            found.add(token_id)
    return tuple(sorted(found))


def _ids(value: Any, place: str) -> Iterator[int]:
    """The ids that ``value`` holds. Raises ``SourceError`` for anything but ids."""
    for item in value if isinstance(value, list | tuple) else [value]:
        if item is None and not isinstance(value, list | tuple):
            continue
        is_digits = isinstance(item, str) and _DIGITS.fullmatch(item.strip())
        if isinstance(item, bool) or not (isinstance(item, int) or is_digits):
            raise SourceError(f"{place}: eos_token_id is {_shown(value)}, expected token ids; {_FIX}")
        if int(item) >= 0:
            yield int(item)


def _shown(value: Any) -> str:
    """``value`` as one short line."""
    return repr(value if isinstance(value, str) and len(value) < 80 else str(value)[:80])


def read_generation_config(name: str, location: str, revision: str | None) -> Any:
    """The attributes of a folder's or hub id's generation_config.json, or None when there is none.

    Raises ``SourceError`` for a file that cannot be fetched, or is no JSON object.
    """
    content = optional_bytes(location, GENERATION_CONFIG, revision, must_know=True)
    if content is None:
        return None
    what = f"{name}: {GENERATION_CONFIG}"
    try:
        data = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # text that is not UTF-8 is a ValueError too
        raise SourceError(f"{what} is not JSON ({kind_and_line(error)}); correct or remove the file") from error
    if not isinstance(data, dict):
        raise SourceError(f"{what} is a JSON {type(data).__name__}, expected an object; correct or remove the file")
    return SimpleNamespace(**data)


def generation_defaults(generation_config: Any) -> dict[str, float]:
    """The sampling settings of a generation config (or None), by the names of specrt's options.

    One that samples and gives no temperature has 1, as in transformers: specrt's own default is greedy.
    Raises ``SourceError`` for one that is no finite number.
    """
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    found = {name: getattr(generation_config, name, None) for name in names}
    is_sampled = getattr(generation_config, "do_sample", None)
    if is_sampled is not None and not isinstance(is_sampled, bool):
        raise SourceError(
            f"generation config: do_sample is {is_sampled!r}, expected true or false; correct {GENERATION_CONFIG}"
        )
    if is_sampled is False:
        found = {"temperature": 0, "repetition_penalty": found["repetition_penalty"]}
    elif is_sampled and found["temperature"] is None:
        found["temperature"] = 1
    given = {name: value for name, value in found.items() if value is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
            raise SourceError(
                f"generation config: {name} is {_shown(value)}, expected a number; correct {GENERATION_CONFIG}"
            )
    return {name: float(value) for name, value in given.items()}
