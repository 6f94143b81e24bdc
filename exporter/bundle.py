"""Atomic writing of a bundle: into a temporary folder next to the output, which is renamed at the end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specrt.engines.errors import ResourceError, UsageError
from specrt.engines.manifest import MANIFEST_NAME, FileEntry, Manifest, manifest_text
from specrt.engines.progress import SILENT, Progress
from specrt.engines.storage.files import EXHAUSTED, UNUSABLE, cannot_write, errno_of, write_text_file
from specrt.engines.storage.folders import LOCK_NAME, check_place, clear_leftovers, new_folder
from specrt.engines.storage.integrity import sha256_of

HINT = "choose another --output"


def check_output(output: Path, force: bool, progress: Progress = SILENT) -> None:
    """Refuse to overwrite a bundle without ``force``, and anything that is not a bundle at all.

    Raises ``ResourceError`` when no bundle can be written at ``output``; writes nothing there. Leftovers of a killed
    export are removed or restored first; ``progress`` gets a line for each.
    """
    clear_leftovers(output.absolute(), progress)
    try:
        entries = None if not output.exists() else set(output.iterdir()) if output.is_dir() else {output}
        is_bundle = not entries or (output / MANIFEST_NAME).is_file()
    except OSError as error:
        raise cannot_write(output, error, HINT) from error
    if not is_bundle:
        raise UsageError(f"{output}: exists and is not a bundle; choose another --output, or move it away")
    if not force and entries:
        raise UsageError(f"{output}: the bundle already exists; pass --force to replace it, or choose another --output")
    check_place(output, HINT)


def check_disk(output: Path, needed_bytes: int) -> None:
    """Raise ``ResourceError`` unless the file system of ``output`` has ``needed_bytes`` free."""
    place = output.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise ResourceError(
            f"{output}: the bundle needs about {needed_bytes / 1e9:.2f} GB and {free / 1e9:.2f} GB are free; "
            "make room, or choose another --output"
        )


@contextmanager
def new_bundle(output: Path, progress: Progress = SILENT) -> Iterator[Path]:
    """A temporary folder that is renamed to ``output`` when the block succeeds, and removed when it raises.

    A full disk or memory in the block raises ``ResourceError``, whichever library reports it.
    """
    try:
        with new_folder(output, progress, HINT) as folder:
            yield folder
    except Exception as error:  # writers in C++ and Rust raise their own exceptions
        number = errno_of(error)
        # numpy's tofile gives no number
        is_unusable = isinstance(error, OSError) and (number in UNUSABLE or number is None)
        if isinstance(error, ResourceError) or not (number in EXHAUSTED or is_unusable):
            raise
        raise cannot_write(output, error, f"make room, or {HINT}") from error


def file_entries(bundle: Path, progress: Progress = SILENT) -> dict[str, FileEntry]:
    """Size and SHA-256 of every file under ``bundle`` except the manifest."""
    paths = sorted(path for path in bundle.rglob("*") if path.is_file() and path.name not in (MANIFEST_NAME, LOCK_NAME))
    return {
        path.relative_to(bundle).as_posix(): FileEntry(path.stat().st_size, sha256_of(path, progress)) for path in paths
    }


def write_manifest(bundle: Path, manifest: Manifest) -> None:
    """Write the manifest, which is the last file of a bundle."""
    write_text_file(bundle / MANIFEST_NAME, manifest_text(manifest))
