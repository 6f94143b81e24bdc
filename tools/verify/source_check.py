"""``specrt verify --source``: whether a bundle was exported from the weights that a model's files hold now.

The fingerprint is computed again from the files, without loading a model, and compared with the one that was recorded
at export, after every loaded tensor had been compared with its file. Reading model files needs the ``export`` extra.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from specrt.engines.errors import UsageError
from specrt.engines.manifest import Manifest, ModelEntry
from specrt.engines.progress import Progress
from specrt.tools.verify.checks import Check

SOURCE_CHECK = "source: "  # the name of a check, before the role
_NEEDED = ("torch", "transformers", "safetensors", "gguf")
NOT_COMPARED = "the weights were not compared with the model's files; --source TARGET does it"


def check_sources(manifest: Manifest, source: str | None, draft_source: str | None, progress: Progress) -> list[Check]:
    """One check for each source that is given: a hub id, a folder or a .gguf file, of the target and of the draft.

    Raises ``UsageError`` for a draft that is not a separate model, or when the ``export`` extra is not installed, and
    ``SourceError`` when the files cannot be read.
    """
    check_usage(manifest, source, draft_source)
    entries = {"target": (manifest.target, source), "draft": (manifest.draft.model, draft_source)}
    found = []
    for role, (entry, name) in entries.items():
        if entry is not None and name is not None:
            progress.note(f"fingerprint of the {role}'s files")
            found.append(_check(role, entry, name))
    return found


def check_usage(manifest: Manifest, source: str | None, draft_source: str | None) -> None:
    """Raise ``UsageError`` for sources that cannot be compared, before minutes are spent on other checks."""
    if draft_source is not None and manifest.draft.model is None:
        raise UsageError(f"--draft-source {draft_source}: draft {manifest.draft.kind} is no model; leave it out")
    if (source, draft_source) != (None, None):
        missing = [name for name in _NEEDED if not importlib.util.find_spec(name)]
        if missing:
            raise UsageError(f"--source: {missing[0]} is needed to read the model; pip install 'specrt[export]'")


def roles_compared(checks: Iterable[Check]) -> tuple[str, ...]:
    """The roles of the models whose files were compared in ``checks``."""
    return tuple(check.name.removeprefix(SOURCE_CHECK) for check in checks if check.name.startswith(SOURCE_CHECK))


def _check(role: str, entry: ModelEntry, name: str) -> Check:
    from specrt.exporter.sources.fingerprint import fingerprint_of
    from specrt.exporter.sources.source import find_checkpoint

    fingerprint = fingerprint_of(find_checkpoint(name, entry.revision if name == entry.source else None))
    same = fingerprint == entry.fingerprint
    return Check(
        f"{SOURCE_CHECK}{role}",
        f"SHA-256 over the tensors of {name}, against the one that export recorded",
        fingerprint[:16] if same else f"{fingerprint[:16]}, recorded {entry.fingerprint[:16]}: other weights",
        same,
        {"source": name, "fingerprint": fingerprint, "recorded": entry.fingerprint},
    )
