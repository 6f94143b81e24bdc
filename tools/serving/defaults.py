"""Sampling defaults of a server, by the conventions of OpenAI and vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from specrt.engines.errors import UsageError
from specrt.engines.manifest import GENERATION_DEFAULTS, Manifest
from specrt.runtime.options import checked

AUTO, NONE = "auto", "none"


def sampling_defaults(generation_config: str, manifest: Manifest) -> Mapping[str, float]:
    """Temperature 1, unless a generation config sets it: the model's (``auto``), ``none``, or a JSON file.

    Raises ``UsageError`` for a file that cannot be read, and for values out of range.
    """
    if generation_config == AUTO:
        values = manifest.generation_defaults
    else:
        values = {} if generation_config == NONE else _from_file(Path(generation_config))
    defaults: dict[str, float] = {"temperature": 1.0}
    for name, value in values.items():
        number = int(value) if name == "top_k" and isinstance(value, float) and value.is_integer() else value
        try:
            defaults[name] = checked(name, number)
        except UsageError as error:
            raise UsageError(f"--generation-config: {error}; give a file, or 'none'") from error
    return defaults


def _from_file(path: Path) -> dict[str, float]:
    if path.is_dir():
        path = path / "generation_config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--generation-config: {path} is not JSON ({error})") from error
    if not isinstance(data, dict):
        raise UsageError(f"--generation-config: {path} holds {type(data).__name__}, expected an object")
    sampling = {name: data[name] for name in GENERATION_DEFAULTS if data.get(name) is not None}
    if data.get("do_sample") is False:
        return {**sampling, "temperature": 0.0}
    return sampling
