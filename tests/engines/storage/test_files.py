"""Files appear whole or not at all; errors of libraries are understood by what caused them."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from specrt.engines.errors import ResourceError, SourceError, UsageError
from specrt.engines.storage.files import check_writable, errno_of, write_file, write_text_file

CAUSES: dict[str, tuple[BaseException, int | None]] = {
    "the system's": (OSError(errno.EROFS, "Read-only file system"), errno.EROFS),
    "memory": (MemoryError(), errno.ENOMEM),
    "Rust's text": (Exception("No space left on device (os error 28)"), errno.ENOSPC),
    "C++'s text": (RuntimeError("std::bad_alloc"), errno.ENOMEM),
    "torch's text": (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), errno.ENOMEM),
    "a loader's text": (ImportError("libfoo.so: cannot open: Too many open files"), errno.EMFILE),
    "none": (ValueError("space"), None),
}


@pytest.mark.parametrize(("error", "number"), CAUSES.values(), ids=CAUSES)
def test_an_error_is_known_by_its_cause(error: BaseException, number: int | None) -> None:
    assert errno_of(error) == number
    wrapped = SourceError("cannot be read")
    wrapped.__cause__ = error
    assert errno_of(wrapped) == number
    hidden = SourceError("something else")
    hidden.__context__, hidden.__suppress_context__ = error, True  # raise ... from None
    assert errno_of(hidden) is None


def test_a_file_is_replaced_whole_and_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    path.chmod(0o640)
    write_text_file(path, "naïve 你好")
    assert path.read_text(encoding="utf-8") == "naïve 你好"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    write_text_file(tmp_path / "ours", "x")
    (tmp_path / "theirs").write_text("x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "theirs").stat().st_mode


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "file")
    write_text_file(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "folder" / "file").read_text() == "x"


def test_a_failure_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ResourceError, match=r"file: cannot be written \(No space left on device\); choose another"):
        write_text_file(path, "after")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_a_device_is_written_as_it_is(tmp_path: Path) -> None:
    write_file(Path("/dev/null"), b"x")
    with pytest.raises(ResourceError, match="/dev/full: cannot be written"):
        write_file(Path("/dev/full"), b"x" * 100000)
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


REFUSED: dict[str, tuple[str, type[Exception], str]] = {
    "a folder": ("folder", UsageError, "it is a folder"),
    "no folder": ("none/file", UsageError, "its folder does not exist"),
    "below a file": ("file/x", ResourceError, "Not a directory"),
    "a long name": ("n" * 256, ResourceError, "File name too long"),
}


@pytest.mark.parametrize(("name", "kind", "text"), REFUSED.values(), ids=REFUSED)
def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, name: str, kind: type[Exception], text: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    check_writable(tmp_path / "new", "-")
    check_writable(tmp_path / "file", "-")
    with pytest.raises(kind, match=text):
        check_writable(tmp_path / name, "choose another")
    with pytest.raises(ResourceError, match="cannot be written there"):
        check_writable(Path("/proc/x"), "choose another")
