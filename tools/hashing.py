"""The first hash of a bundle's files, with progress, since it takes seconds per GB."""

from __future__ import annotations

from pathlib import Path

from specrt.engines.manifest import Manifest, manifest_from_bundle
from specrt.engines.storage.integrity import check_files
from specrt.tools.terminal.progress import shown_progress


def checked_manifest(bundle: Path, always_hash: bool = False) -> Manifest:
    """The manifest of a bundle whose files pass ``specrt.engines.storage.integrity.check_files``.

    Raises ``BundleError``.
    """
    manifest = manifest_from_bundle(bundle)
    with shown_progress() as progress:
        check_files(bundle, manifest, always_hash, progress)
    return manifest
