"""A folder that appears whole or not at all, and the removal of what a killed process left of one.

Work is done in ``.NAME.partial-XXXXXXXX`` next to its place and renamed at the end; a folder that is replaced waits in
``.NAME.old-XXXXXXXX`` meanwhile. Each holds a lock file that its process keeps locked. The system frees the lock when
the process ends, however it ends, so a free lock means that nobody owns the folder. A folder without such a file is
not ours and is left alone.
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
except ImportError:  # Windows: nothing is locked there, and so nothing is removed
    fcntl = None

LOCK_NAME = ".specrt-lock"
HINT = "choose another place"
FOREIGN_S = 24 * 3600.0  # a lock of another machine is believed to be free after so long without a change
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAME_BYTES = 200  # of the name in a temporary one; file systems allow 255 bytes
_UNLOCKED_S = 60.0  # a folder this young may be about to get its lock


@contextmanager
def new_folder(place: Path, progress: Progress = SILENT, hint: str = HINT) -> Iterator[Path]:
    """A temporary folder that takes the place of ``place`` when the block ends well, and is removed when it does not.

    First, what killed processes left next to ``place`` is removed or restored; ``progress`` gets a line for each.
    Raises ``ResourceError``, which says ``hint``, where no folder can be made; folders above ``place`` that were made
    for it go again if it fails.
    """
    place = place.absolute()
    with made_parents(place.parent, hint):
        clear_leftovers(place, progress)
        with locked_folder(place, "partial", hint) as partial:
            yield partial
            partial.chmod(0o755)
            _put(partial, place)


class _TrialEnds(Exception):
    """Ends the block of a trial, so that all is removed."""


def check_place(place: Path, hint: str = HINT) -> None:
    """Raise ``ResourceError`` unless ``new_folder`` can work on ``place``: a trial, of which nothing is left."""
    place = place.absolute()
    with suppress(_TrialEnds), made_parents(place.parent, hint), locked_folder(place, "trial", hint):
        raise _TrialEnds


@contextmanager
def locked_folder(place: Path, kind: str, hint: str = HINT) -> Iterator[Path]:
    """A folder ``.NAME.KIND-XXXXXXXX`` next to ``place``, locked until it is removed at the end of the block.

    Where it was renamed in the block, only its lock file is removed. Raises ``ResourceError``.
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
    """Remove what no live process owns of earlier work on ``place``; restore a folder that was about to be replaced."""
    for folder, kind in _temporary_folders(place):
        handle = _lock_of_nobody(folder)
        if handle is None:
            if not (folder / LOCK_NAME).exists() and time.time() - _last_change(folder) > _UNLOCKED_S:
                progress.note(
                    f"{folder}: has no lock of specrt and is left alone; remove it by hand if nothing works on it"
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
    """Rename ``partial`` to ``place``. What was there is kept until that is done, and put back if it fails."""
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
    """Make ``folder`` and those above it; remove again, when the block fails, those that were made and are empty.

    Raises ``ResourceError`` where one cannot be made.
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
    """What the names of temporary folders begin with; a long name is shortened, as they are longer than it."""
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
        _remove(folder, handle)  # another process took the folder for a leftover before it was locked


def _remove(folder: Path, handle: int | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if handle is not None:
        os.close(handle)


def _is_ours(folder: Path, handle: int) -> bool:
    """Lock, and see that the lock file is still there: whoever removes a folder holds its lock."""
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
    """Folders next to ``place`` that are named as ours, with their kind."""
    found = []
    for kind in ("old", "partial", "trial"):
        pattern = re.compile(re.escape(_stem(place, kind)) + r"[a-z0-9_]{8}")
        with suppress(OSError):
            found += [(path, kind) for path in place.parent.iterdir() if pattern.fullmatch(path.name)]
    return [(path, kind) for path, kind in sorted(found) if path.is_dir() and not path.is_symlink()]


def _lock_of_nobody(folder: Path) -> int | None:
    """The lock of ``folder``, taken, where no live process holds it; None where one may, or where it is not ours."""
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
    """This run of this machine's kernel: a lock of another one may be invisible here, on a network disk."""
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
