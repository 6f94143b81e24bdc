"""The cache folder of specrt, also for a user without a home.

A container may run as a uid without a passwd entry, as ``nobody`` with a home that does not exist, or on a read-only
disk. Then a private folder in the temporary folder is used instead of ``~/.cache``.
"""

from __future__ import annotations

import atexit
import functools
import getpass
import os
import shutil
import stat
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

NOWHERE = Path(os.devnull) / "specrt"  # a path below a file, where no folder can be made
# Variables that libraries use instead of the home. They are only set if the home cannot be used.
_LIBRARY_FOLDERS = {
    "HF_HOME": "huggingface",
    "MPLCONFIGDIR": "matplotlib",
    "TORCH_HOME": "torch",
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "TRITON_CACHE_DIR": "triton",
}


def cache_dir() -> Path:
    """The folder for small cached files: ``$SPECRT_CACHE`` or ``user_cache_dir()``."""
    own = os.environ.get("SPECRT_CACHE")
    return Path(own) if own else user_cache_dir()


def user_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/specrt`` or ``~/.cache/specrt``; a private temporary folder if neither can be made."""
    for folder in _caches():
        if (folder / "specrt").is_dir() or _can_make(folder):
            return folder / "specrt"
    return private_folder()


def provide_home(env: MutableMapping[str, str] = os.environ) -> None:
    """Set a home and a user name for the libraries of this process, if missing. Commands call it first."""
    home = home_dir()
    if home is None and private_folder() != NOWHERE:
        env["HOME"] = str(private_folder())
    if not any(map(_can_make, _caches())) and private_folder() != NOWHERE:
        for name, folder in _LIBRARY_FOLDERS.items():
            has_own = name == "HF_HOME" and home is not None and os.path.isdir(home / ".cache" / folder)
            if not has_own:  # a read-only home may hold models to read
                env.setdefault(name, str(private_folder() / folder))
    try:
        getpass.getuser()
    except (KeyError, OSError, ImportError):
        env["USER"] = f"uid{_uid()}"


def home_dir() -> Path | None:
    """``$HOME``, or the home of the passwd entry; None without either."""
    own = os.environ.get("HOME")
    if own:
        return Path(own)
    try:
        import pwd

        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except (ImportError, KeyError, AttributeError):
        found = os.path.expanduser("~")
        return None if own == "" or not os.path.isabs(found) else Path(found)


@functools.cache
def private_folder() -> Path:
    """A folder in the temporary folder that only this user can read. It is the same for each process.

    If another user has taken its name, it is a new folder that is removed at exit. ``NOWHERE`` if none can be made.
    """
    try:
        path = Path(tempfile.gettempdir()) / f"specrt-{_uid()}"
        path.mkdir(mode=0o700, exist_ok=True)
        if _is_private(path.lstat()):
            return path
    except OSError:
        pass
    try:
        path = Path(tempfile.mkdtemp(prefix="specrt-"))
    except OSError:
        return NOWHERE
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def _is_private(info: os.stat_result) -> bool:
    return stat.S_ISDIR(info.st_mode) and info.st_uid == _uid() and not info.st_mode & 0o077


def _uid() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def _caches() -> list[Path]:
    """Cache folders from the environment, in order. A home that does not exist is not created."""
    xdg, home = os.environ.get("XDG_CACHE_HOME", ""), home_dir()
    found = [Path(xdg)] if os.path.isabs(xdg) else []
    return [*found, *([home / ".cache"] if home is not None and os.path.isdir(home) else [])]


def _can_make(folder: Path) -> bool:
    """Whether ``folder`` exists or can be made, and is writable."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)
