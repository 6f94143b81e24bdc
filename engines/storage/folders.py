"""Atomic creation of folders, and removal of the temporary folders of killed processes.

Work is done in ``.NAME.partial-XXXXXXXX`` next to the target and renamed at the end. A folder that is replaced is kept
in ``.NAME.old-XXXXXXXX`` until then. Each holds a lock file that its process keeps locked. The system frees the lock
when the process ends for any reason, so a free lock means that no process owns the folder. A folder without such a
file is not specrt's and is not changed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from specrt.engines.progress import SILENT, Progress
from specrt.engines.storage.files import cannot_write

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: there are no locks, so leftovers are not removed
    fcntl = None

LOCK_NAME = ".specrt-lock"
HINT = "choose another place"
FOREIGN_S = 24 * 3600.0  # after this time without a change, a lock of another machine counts as free
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAME_BYTES = 200  # kept of the name in a temporary name; file systems allow 255 bytes
_UNLOCKED_S = 60.0  # a folder this young may be about to get its lock


@contextmanager
def new_folder(place: Path, progress: Progress = SILENT, hint: str = HINT) -> Iterator[Path]:
    """A temporary folder that is renamed to ``place`` if the block succeeds, and removed if it fails.

    First, leftovers of killed processes next to ``place`` are removed or restored; ``progress`` gets a line for each.
    Raises ``ResourceError`` with ``hint`` if no folder can be made. Parents of ``place`` that were made for it are
    removed again on failure.
    """
    place = place.absolute()
    with made_parents(place.parent, hint):
        clear_leftovers(place, progress)
        with locked_folder(place, "partial", hint) as partial:
            yield partial
            partial.chmod(0o755)
            _put(partial, place)


class _TrialEnds(Exception):
    """Ends the block of a trial, so that its folder is removed."""


def check_place(place: Path, hint: str = HINT) -> None:
    """Raise ``ResourceError`` unless ``new_folder`` works for ``place``. Tries it and removes the folder."""
    place = place.absolute()
    with suppress(_TrialEnds), made_parents(place.parent, hint), locked_folder(place, "trial", hint):
        raise _TrialEnds


@contextmanager
def locked_folder(place: Path, kind: str, hint: str = HINT) -> Iterator[Path]:
    """A folder ``.NAME.KIND-XXXXXXXX`` next to ``place``, locked until it is removed at the end of the block.

    If it was renamed in the block, only its lock file is removed. Raises ``ResourceError``.
    """
    folder, handle = _make_locked(place, kind, hint)
    inode = folder.stat().st_ino
    try:
        yield folder
    finally:
        renamed = not folder.exists()
        if renamed and place.exists() and place.stat().st_ino == inode:
            with suppress(OSError):
                (place / LOCK_NAME).unlink()
        _remove(folder, handle)


def clear_leftovers(place: Path, progress: Progress = SILENT) -> None:
    """Remove leftovers of earlier work on ``place`` without a live owner; restore a folder that was being replaced."""
    for folder, kind in _temporary_folders(place):
        handle = _free_lock(folder)
        if handle is None:
            if not (folder / LOCK_NAME).exists() and time.time() - _last_change(folder) > _UNLOCKED_S:
                progress.note(
                    f"{folder}: has no lock of specrt and was not changed; remove it by hand if no process uses it"
                )
            continue
        try:
            kept = folder / place.name
            if kind == "old" and kept.exists() and not os.path.lexists(place):
                kept.rename(place)
                progress.note(f"{place}: restored; an interrupted command had moved it to {folder.name}")
            num_bytes = _size(folder)
            shutil.rmtree(folder)
            if kind == "partial":
                progress.note(f"{folder}: removed {num_bytes / 1e6:.1f} MB that an interrupted command had left")
        except OSError as error:
            progress.note(f"{folder}: left by an interrupted command and cannot be removed ({error.strerror})")
        finally:
            os.close(handle)


def _put(partial: Path, place: Path) -> None:
    """Rename ``partial`` to ``place``. An existing folder is kept until then, and put back on failure."""
    if not os.path.lexists(place):
        partial.rename(place)
        return
    with locked_folder(place, "old") as old:
        kept = old / place.name
        try:
            place.rename(kept)
            partial.rename(place)
        finally:
            if kept.exists() and not os.path.lexists(place):
                kept.rename(place)


@contextmanager
def made_parents(folder: Path, hint: str = HINT) -> Iterator[None]:
    """Make ``folder`` and its parents. If the block fails, remove the new ones that are empty.

    Raises ``ResourceError`` if one cannot be made.
    """
    missing: list[Path] = []
    while not os.path.lexists(folder) and folder != folder.parent:
        missing.append(folder)
        folder = folder.parent
    try:
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
        yield
    except BaseException as error:
        for path in missing:
            with suppress(OSError):
                path.rmdir()
        if isinstance(error, OSError) and error.filename in map(str, missing):
            raise cannot_write(Path(error.filename), error, hint) from error
        raise


def _stem(place: Path, kind: str) -> str:
    """The prefix of temporary names. A long name is shortened, since temporary names are longer."""
    name = place.name
    if len(os.fsencode(name)) > _NAME_BYTES:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
    return f".{name}.{kind}-"


def _make_locked(place: Path, kind: str, hint: str) -> tuple[Path, int]:
    try:
        os.lstat(place)  # a name that is too long is refused here
    except FileNotFoundError:
        pass
    except OSError as error:
        raise cannot_write(place, error, hint) from error
    while True:
        try:
            folder = Path(tempfile.mkdtemp(prefix=_stem(place, kind), dir=place.parent))
        except OSError as error:
            raise cannot_write(place, error, hint) from error
        handle = None
        try:
            handle = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            if _is_ours(folder, handle):
                return folder, handle
        except BaseException as error:
            _remove(folder, handle)
            if isinstance(error, OSError):
                raise cannot_write(place, error, hint) from error
            raise
        _remove(folder, handle)  # another process took it for a leftover before it was locked


def _remove(folder: Path, handle: int | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if handle is not None:
        os.close(handle)


def _is_ours(folder: Path, handle: int) -> bool:
    """Lock, and check that the lock file still exists: a process that removes a folder holds its lock."""
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks: others cannot lock it either
    os.write(handle, _boot_id().encode())
    try:
        return os.path.samestat(os.fstat(handle), os.stat(folder / LOCK_NAME))
    except FileNotFoundError:
        return False


def _temporary_folders(place: Path) -> list[tuple[Path, str]]:
    """Temporary folders next to ``place`` by their names, with their kind."""
    found = []
    for kind in ("old", "partial", "trial"):
        pattern = re.compile(re.escape(_stem(place, kind)) + r"[a-z0-9_]{8}")
        with suppress(OSError):
            found += [(path, kind) for path in place.parent.iterdir() if pattern.fullmatch(path.name)]
    return [(path, kind) for path, kind in sorted(found) if path.is_dir() and not path.is_symlink()]


def _free_lock(folder: Path) -> int | None:
    """Take the lock of ``folder``. None if a live process may hold it, or the folder has no lock of specrt."""
    if fcntl is None:
        return None
    try:
        handle = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_here = os.read(handle, 64).decode("ascii", "replace") == _boot_id()
        if is_here or time.time() - _last_change(folder) > FOREIGN_S:
            return handle
    except OSError:
        pass
    os.close(handle)
    return None


def _boot_id() -> str:
    """The boot id of this machine. Locks of another machine on a network disk may be invisible here."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return "-"


def _files(folder: Path) -> Iterator[os.stat_result]:
    for path in (folder, *folder.rglob("*")):
        with suppress(OSError):
            yield path.lstat()


def _size(folder: Path) -> int:
    return sum(info.st_size for info in _files(folder))


def _last_change(folder: Path) -> float:
    return max((info.st_mtime for info in _files(folder)), default=time.time())
