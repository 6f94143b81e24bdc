"""A file that one process at a time may write to."""

from __future__ import annotations

from typing import IO, Any

from specrt.engines.errors import ResourceError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None


def lock(file: IO[bytes], message: str) -> None:
    """Lock an open file until it is closed; the system does so when the process ends, however it ends.

    Raises ``ResourceError`` with ``message`` if another process holds the lock, and closes the file.
    """
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ResourceError(message) from error
    except OSError:
        pass  # a file system without locks
