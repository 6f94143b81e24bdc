"""Checks a bundle's files against its manifest.

Sizes are always compared, the SHA-256 once for each (size, mtime, ctime); the result is cached.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from specrt.engines.errors import BundleError, ResourceError
from specrt.engines.manifest import FileEntry, Manifest
from specrt.engines.progress import SILENT, Progress
from specrt.engines.storage.files import write_text_file
from specrt.engines.storage.home import cache_dir as cache_dir

CHUNK_BYTES = 1 << 22
LONG_BYTES = 1 << 28  # hashing this takes about half a second; progress is shown from here on
FIX = "copy the bundle again or export it again"


def sha256_of(path: Path, progress: Progress = SILENT) -> str:
    """Hex SHA-256 of a file; ``progress`` advances by the bytes of each chunk."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
            progress.advance(len(chunk))
    return digest.hexdigest()


def check_files(bundle: Path, manifest: Manifest, always_hash: bool = False, progress: Progress = SILENT) -> None:
    """Raise ``BundleError`` unless every file of the manifest exists, complete and unchanged.

    ``progress`` shows the hashing of large files in bytes.
    """
    for name, entry in manifest.files.items():
        _check_size(bundle / name, name, entry)
    ledger = _Ledger(cache_dir() / "verified.json")
    entries = [((bundle / name).resolve(), entry) for name, entry in manifest.files.items()]
    unknown = [(path, entry) for path, entry in entries if always_hash or not ledger.knows(path, entry)]
    total = sum(entry.num_bytes for _, entry in unknown)
    if total >= LONG_BYTES:
        progress.step(f"hashing {total / 1e9:.1f} GB", total)
    for path, entry in unknown:
        digest = sha256_of(path, progress)
        if digest != entry.sha256:
            raise BundleError(f"{path}: SHA-256 is {digest[:12]}…, expected {entry.sha256[:12]}…; {FIX}")
        ledger.add(path, entry)
    ledger.save()


def _check_size(path: Path, name: str, entry: FileEntry) -> None:
    if not path.is_file():
        raise BundleError(f"{path}: missing file of the bundle ({name}); {FIX}")
    num_bytes = path.stat().st_size
    if num_bytes != entry.num_bytes:
        raise BundleError(f"{path}: {num_bytes} bytes, expected {entry.num_bytes}; {FIX}")


class _Ledger:
    """The files that were already hashed, by path, size, mtime and digest. Without it files are hashed again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed = False
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            self._known: dict[str, list[object]] = data if isinstance(data, dict) else {}
        except (OSError, ValueError):
            self._known = {}

    @staticmethod
    def _stamp(path: Path, entry: FileEntry) -> list[object]:
        stat = path.stat()
        return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, entry.sha256]

    def knows(self, path: Path, entry: FileEntry) -> bool:
        return self._known.get(str(path)) == self._stamp(path, entry)

    def add(self, path: Path, entry: FileEntry) -> None:
        self._known[str(path)] = self._stamp(path, entry)
        self._changed = True

    def save(self) -> None:
        if not self._changed:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text_file(self._path, json.dumps(self._known))
        except (OSError, ResourceError):
            return  # a read-only home: hash again next time
