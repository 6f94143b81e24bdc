"""Where caches are kept: what the environment names where that can be used, else a private temporary folder."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from specrt.engines.storage import home
from specrt.engines.storage.home import NOWHERE, cache_dir, private_folder, provide_home


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An environment without variables, and a temporary folder of the test."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    for name in ("SPECRT_CACHE", "XDG_CACHE_HOME", "HOME", *home._LIBRARY_FOLDERS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    private_folder.cache_clear()
    yield folder
    private_folder.cache_clear()


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a passwd entry."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)


def test_what_is_named_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "specrt"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert cache_dir() == tmp_path / ".cache" / "specrt"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "specrt"
    monkeypatch.setenv("SPECRT_CACHE", "/anywhere")
    assert cache_dir() == Path("/anywhere")


@pytest.mark.parametrize("where", ["/nonexistent", __file__, None, ""])
def test_a_home_that_cannot_be_used_is_replaced(
    where: str | None, temporary: Path, nobody: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where is not None:
        monkeypatch.setenv("HOME", where)
    assert cache_dir() == temporary / f"specrt-{os.getuid()}"
    assert stat.S_IMODE(cache_dir().stat().st_mode) == 0o700
    env: dict[str, str] = {}
    provide_home(env)
    assert Path(env["HF_HOME"]).is_relative_to(temporary)
    assert ("HOME" in env) == (not where), "a home that the user names is not replaced, as it may hold models"


def test_a_home_that_can_be_used_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USER", "someone")
    env: dict[str, str] = {}
    provide_home(env)
    assert env == {}


def test_a_name_taken_by_someone_else_is_not_used(temporary: Path, nobody: None) -> None:
    taken = temporary / f"specrt-{os.getuid()}"
    taken.mkdir()
    taken.chmod(0o755)
    found = cache_dir()
    assert found.parent == temporary and found != taken
    assert stat.S_IMODE(found.stat().st_mode) == 0o700


def test_a_link_with_our_name_is_not_followed(temporary: Path, tmp_path: Path, nobody: None) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    (temporary / f"specrt-{os.getuid()}").symlink_to(tmp_path / "theirs")
    assert not cache_dir().resolve().is_relative_to(tmp_path / "theirs")


def test_without_a_temporary_folder_nothing_is_kept(nobody: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    assert cache_dir() == NOWHERE
    provide_home({})


def test_a_user_without_a_name_gets_one(nobody: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    env: dict[str, str] = {}
    provide_home(env)
    assert env["USER"] == f"uid{os.getuid()}"
