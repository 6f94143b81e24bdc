"""A bundle appears whole or not at all: written to a temporary folder beside its place, renamed at the end."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from specrt.engines.errors import ResourceError, UsageError
from specrt.engines.integrity import sha256_of
from specrt.engines.manifest import MANIFEST_NAME, FileEntry, Manifest, manifest_text


def check_output(output: Path, force: bool) -> None:
    """Refuse to overwrite a bundle without ``force``, and anything that is not a bundle at all."""
    if not output.exists():
        return
    is_bundle = output.is_dir() and ((output / MANIFEST_NAME).is_file() or not any(output.iterdir()))
    if not is_bundle:
        raise UsageError(f"{output}: exists and is not a bundle; choose another --output, or move it away")
    if not force and any(output.iterdir()):
        raise UsageError(f"{output}: a bundle is there already; pass --force to replace it, or choose another --output")


def check_disk(output: Path, needed_bytes: int) -> None:
    """Raise ``ResourceError`` unless the place of ``output`` has room for ``needed_bytes``."""
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
def new_bundle(output: Path) -> Iterator[Path]:
    """A temporary folder that becomes ``output`` when the block ends well, and is removed when it does not."""
    output = output.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{output.name}.partial-", dir=output.parent))
    try:
        yield partial
        partial.chmod(0o755)
        _replace(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _replace(partial: Path, output: Path) -> None:
    if not output.exists():
        partial.rename(output)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{output.name}.old-", dir=output.parent))
    output.rename(old / output.name)
    partial.rename(output)
    shutil.rmtree(old, ignore_errors=True)


def file_entries(bundle: Path, advance: Callable[[int], None]) -> dict[str, FileEntry]:
    """Size and SHA-256 of every file under ``bundle`` but the manifest."""
    paths = sorted(path for path in bundle.rglob("*") if path.is_file() and path.name != MANIFEST_NAME)
    return {
        path.relative_to(bundle).as_posix(): FileEntry(path.stat().st_size, sha256_of(path, advance)) for path in paths
    }


def write_manifest(bundle: Path, manifest: Manifest) -> None:
    """The last file of a bundle."""
    (bundle / MANIFEST_NAME).write_text(manifest_text(manifest), encoding="utf-8")
