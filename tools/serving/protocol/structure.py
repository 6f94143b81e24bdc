"""Fields for structured output: OpenAI's ``response_format``, vLLM's ``structured_outputs``, and llama.cpp's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from specrt.serving.protocol.errors import invalid
from specrt.serving.protocol.fields import Fields

MAX_TEXTS = 1024  # of a choice


@dataclass(frozen=True)
class Structure:
    """``option`` of the runtime with its ``value``; ``param`` is the field that it comes from, as a path."""

    option: str
    value: Any
    param: str

    @property
    def is_json(self) -> bool:
        """Whether the text is JSON, by a schema or not."""
        return self.option in ("json_schema", "json_object")


def structure_of(fields: Fields) -> Structure | None:
    """The structure of the text, from at most one field. Raises ``ApiError``."""
    given = [_response_format(fields), _structured_outputs(fields)]
    for name in ("json_schema", "grammar"):  # llama.cpp's
        value = fields.take(name)
        given.append(None if value is None else Structure(name, value, name))
    found = [structure for structure in given if structure is not None]
    if len(found) > 1:
        raise invalid(found[1].param, f"got it with {found[0].param}; give one of the two")
    return found[0] if found else None


def _response_format(fields: Fields) -> Structure | None:
    given = fields.take("response_format")
    if given is None:
        return None
    form = Fields(given, fields.name("response_format"))
    kind = form.one_of("type", ("text", "json_object", "json_schema"))
    if kind is None:
        raise form.wrong("type", None, "'text', 'json_object' or 'json_schema'")
    # llama.cpp has the schema here, with both types
    structure = None if kind == "text" else _of("json_schema", form, "schema")
    if kind == "json_schema" and structure is None:
        structure = _schema(Fields(form.take("json_schema"), form.name("json_schema")))
    if kind == "json_object" and structure is None:
        structure = Structure("json_object", True, form.name("type"))
    form.end()
    return structure


def _schema(named: Fields) -> Structure:
    """The structure in OpenAI's object. ``strict`` has no effect: a schema is always followed."""
    named.text("name")
    named.text("description")
    named.flag("strict")
    structure = _of("json_schema", named, "schema")
    if structure is None:
        raise named.wrong("schema", None, "a JSON schema")
    named.end()
    return structure


def _structured_outputs(fields: Fields) -> Structure | None:
    given = fields.take("structured_outputs")
    if given is None:
        return None
    outputs = Fields(given, fields.name("structured_outputs"))
    names = {"json": "json_schema", "regex": "regex", "grammar": "grammar", "choice": "grammar"}
    found = [_of(option, outputs, name) for name, option in names.items()]
    if outputs.flag("json_object"):
        found.append(Structure("json_object", True, outputs.name("json_object")))
    outputs.end()
    one = [structure for structure in found if structure is not None]
    if len(one) != 1:
        raise invalid(outputs.path, f"got {len(one)} of {', '.join(names)} and json_object, expected one")
    return _choice(one[0]) if one[0].param.endswith(".choice") else one[0]


def _choice(structure: Structure) -> Structure:
    """A grammar of a list of allowed texts."""
    texts = structure.value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise invalid(structure.param, "expected a list of strings, none of them empty")
    if len(texts) > MAX_TEXTS:
        raise invalid(structure.param, f"got {len(texts)} strings, expected at most {MAX_TEXTS}")
    lark = "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts) + "\n"
    return Structure("grammar", lark, structure.param)


def _of(option: str, fields: Fields, name: str) -> Structure | None:
    value = fields.take(name)
    return None if value is None else Structure(option, value, fields.name(name))
