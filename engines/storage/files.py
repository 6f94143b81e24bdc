"""Atomic writes of files, and messages for errors of the operating system.

``errno_of`` finds the cause of a library's error: C++ and Rust code report a full disk as text only.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

from specrt.engines.errors import ResourceError, UsageError, one_line

# Exhausted disk, memory or file descriptors: not caused by the input.
EXHAUSTED = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
# Errors of an output path.
UNUSABLE = EXHAUSTED | {errno.EROFS, errno.EIO, errno.EBADF, errno.ENXIO, errno.ESTALE, errno.EBUSY, errno.ETXTBSY}
_TEXTS = {os.strerror(number).lower(): number for number in EXHAUSTED | {errno.EROFS}}
_TEXTS |= {"std::bad_alloc": errno.ENOMEM, "can't allocate memory": errno.ENOMEM, "out of memory": errno.ENOMEM}


def errno_of(error: BaseException | None) -> int | None:
    """The ``errno`` of an error or of one that caused it, by its attribute, its type or its text."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, MemoryError):
            return errno.ENOMEM
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        text = str(error).lower()
        for known, number in _TEXTS.items():
            if known in text:
                return number
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def reason_of(error: BaseException) -> str:
    """A short reason: the operating system's text if the error is one of the system's."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return one_line(error)


def cannot_write(path: Path, error: BaseException, hint: str) -> ResourceError:
    """The error for an output that cannot be used; ``hint`` says how to fix it."""
    return ResourceError(f"{path}: cannot be written ({reason_of(error)}); {hint}")


def check_writable(path: Path, hint: str, what: str = "it") -> None:
    """Raise unless a file can be written at ``path``. Leaves no file. For use before long work.

    Raises ``UsageError`` if ``path`` is a folder or its parent does not exist, and ``ResourceError`` if the system
    does not allow it.
    """
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            raise UsageError(f"{path}: {what} cannot be written there, it is a folder; {hint}")
    except FileNotFoundError:
        if not os.path.lexists(path.parent):
            raise UsageError(
                f"{path}: {what} cannot be written there, its folder does not exist; make it first"
            ) from None
    except OSError as error:
        raise ResourceError(f"{path}: {what} cannot be written there ({reason_of(error)}); {hint}") from error
    place = path if path.exists() else path.parent
    why = None if os.access(place, os.W_OK) else _why_not(place)
    if why is None and place != path:  # some folders refuse root, although os.access allows it
        try:
            handle, name = tempfile.mkstemp(dir=place, prefix=".specrt-")
            os.close(handle)
            os.unlink(name)
        except OSError as error:
            why = reason_of(error)
    if why is not None:
        raise ResourceError(f"{path}: {what} cannot be written there ({why}); {hint}")


def _why_not(place: Path) -> str:
    """The system's error text for a path that ``os.access`` refuses."""
    read_only = hasattr(os, "statvfs") and os.statvfs(place).f_flag & os.ST_RDONLY
    return os.strerror(errno.EROFS if read_only else errno.EACCES)


def write_text_file(path: Path, text: str, hint: str = "choose another place, or make room") -> None:
    """Write ``text`` as UTF-8. Raises ``ResourceError``; an existing file is then unchanged."""
    write_file(path, text.encode("utf-8"), hint)


def write_file(path: Path, content: bytes | memoryview, hint: str = "choose another place, or make room") -> None:
    """Write ``content``. Raises ``ResourceError``; an existing file is then unchanged."""
    try:
        place = path.resolve()
        if (place.exists() and not place.is_file()) or not os.access(place.parent, os.W_OK):
            path.write_bytes(content)  # a device, a pipe, or a writable file in a folder that is not writable
        else:
            _replace(place, content)
    except (OSError, RuntimeError) as error:  # RuntimeError: a cycle of links
        raise cannot_write(path, error, hint) from error


def _replace(place: Path, content: bytes | memoryview) -> None:
    """Write next to ``place`` and rename. Permissions are those of the old file, or the default ones."""
    handle, name = tempfile.mkstemp(dir=place.parent, prefix=".specrt-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, stat.S_IMODE(place.stat().st_mode) if place.exists() else 0o666 & ~_umask())
        os.replace(name, place)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
