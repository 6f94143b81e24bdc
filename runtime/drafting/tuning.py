"""The measurements of ``specrt tune`` for a bundle, and whether they are valid on this machine."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specrt.engines.codec import from_json, to_json
from specrt.engines.manifest import MANIFEST_NAME
from specrt.engines.processor import cpu_name
from specrt.engines.storage.files import write_text_file


@dataclass(frozen=True)
class Tuning:
    """Times in ms: ``target_ms`` by width of a verification pass, ``draft_ms`` by tokens fed in a draft pass.

    ``acceptance`` holds, by source (see ``specrt.runtime.drafting.adaptive``), P(drafted token i is accepted | those
    before were). ``fingerprint`` is what the measurement depends on, by name.
    """

    fingerprint: dict[str, str]
    created_utc: str
    target_ms: dict[str, float]
    draft_ms: dict[str, float]
    acceptance: dict[str, tuple[float, ...]]


HINT = "copy the bundle to a folder of your own"


def tuning_path(bundle: Path) -> Path:
    """The path of the tuning of ``bundle``, next to the bundle."""
    bundle = bundle.absolute()
    return bundle.with_name(f"{bundle.name}.tuning.json")


def fingerprint(bundle: Path, places: tuple[str, str], threads: int) -> dict[str, str]:
    """What a measurement depends on, by name. ``places`` are backend and device of target and draft."""
    return {
        "bundle": hashlib.sha256((bundle / MANIFEST_NAME).read_bytes()).hexdigest()[:16],
        "cpu": cpu_name(),
        "threads": str(threads),
        "backend": places[0],
        "draft_backend": places[1],
        "specrt": _version("specrt"),
        "onnxruntime": _version("onnxruntime"),
    }


def write_tuning(bundle: Path, tuning: Tuning) -> None:
    """Write ``tuning`` next to its bundle."""
    write_text_file(tuning_path(bundle), json.dumps(to_json(tuning), indent=1) + "\n", HINT)


def tuning_for(
    bundle: Path, places: tuple[str, str], threads: int, report: Callable[[str], None] = lambda line: None
) -> Tuning | None:
    """The tuning of ``bundle`` if it is valid here. ``report`` gets a line about one that is not."""
    path = tuning_path(bundle)
    if not path.is_file():
        return None
    try:
        tuning = from_json(Tuning, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        report(f"{path}: not used, it cannot be read ({error}); measure again with 'specrt tune {bundle}'")
        return None
    here = fingerprint(bundle, places, threads)
    differing = [name for name, value in here.items() if tuning.fingerprint.get(name) != value]
    if differing:
        name = differing[0]
        report(
            f"{path}: not used, it was measured with {name} {tuning.fingerprint.get(name)}, here it is {here[name]}; "
            f"measure again with 'specrt tune {bundle}'"
        )
        return None
    return tuning


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
