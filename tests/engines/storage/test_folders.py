"""A new folder is whole or absent; what a killed process left is removed, and nothing else is."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specrt.engines.errors import ResourceError
from specrt.engines.storage import folders
from specrt.engines.storage.folders import LOCK_NAME, check_place, clear_leftovers, locked_folder, new_folder
from tests.progress import KeptProgress

KILLED = """
import sys, time
from pathlib import Path
from specrt.engines.storage import folders
from specrt.engines.storage.folders import new_folder

if sys.argv[2] == "replace":  # stopped between the two renames
    rename = Path.rename

    def slow(self, place):
        if "partial" in self.name:
            print("here", flush=True)
            time.sleep(60)
        return rename(self, place)

    Path.rename = slow
with new_folder(Path(sys.argv[1])) as folder:
    (folder / "weights").write_bytes(b"x" * 1000)
    if sys.argv[2] == "write":
        print("here", flush=True)
        time.sleep(60)
"""


def killed(place: Path, when: str, progress: KeptProgress | None = None) -> None:
    """A process that works on ``place`` until it is killed; ``progress`` gets what is cleared while it lives."""
    command = [sys.executable, "-c", KILLED, str(place), when]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        if progress is not None:
            before = sorted(place.parent.rglob("*"))
            clear_leftovers(place, progress)
            assert sorted(place.parent.rglob("*")) == before, "it lives: nothing is removed"
        process.send_signal(signal.SIGKILL)


def test_what_a_killed_process_left_is_removed_and_reported(tmp_path: Path) -> None:
    while_it_lives = KeptProgress()
    killed(tmp_path / "bundle", "write", while_it_lives)
    assert while_it_lives.notes == []
    (left,) = tmp_path.iterdir()
    reported = KeptProgress()
    with new_folder(tmp_path / "bundle", reported) as folder:
        (folder / "file").touch()
    assert reported.notes == [f"{left}: removed 0.0 MB that an interrupted command had left"]
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == ["bundle", "bundle/file"]


def test_a_folder_that_was_about_to_be_replaced_is_restored(tmp_path: Path) -> None:
    place = tmp_path / "bundle"
    place.mkdir()
    (place / "old").touch()
    killed(place, "replace")
    assert not place.exists(), "else the test shows nothing"
    reported = KeptProgress()
    clear_leftovers(place, reported)
    assert (place / "old").exists()
    assert sorted(tmp_path.iterdir()) == [place]
    assert len(reported.notes) == 2 and "restored" in reported.notes[0]


def foreign(tmp_path: Path) -> list[Path]:
    """Folders that are not specrt's and must stay, whichever names they have."""
    names = [".bundle.partial-abcdefg", ".bundle.partial-abcdefgh", ".bundle.partial-mine", ".bundle2.partial-abcdefgh"]
    made = [tmp_path / name for name in names]
    for path in made:
        path.mkdir()
        (path / "weights").touch()
    (made[0] / LOCK_NAME).touch()  # seven letters
    (made[3] / LOCK_NAME).touch()  # of another bundle
    return made


def test_folders_that_only_look_like_ours_stay(tmp_path: Path) -> None:
    made = foreign(tmp_path)
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / LOCK_NAME).touch()
    (tmp_path / ".bundle.partial-linkedto").symlink_to(target)
    os.utime(made[1] / "weights", (0, 0))
    os.utime(made[1], (0, 0))
    reported = KeptProgress()
    clear_leftovers(tmp_path / "bundle", reported)
    assert [path for path in made if not path.exists()] == [] and (target / LOCK_NAME).exists()
    assert len(reported.notes) == 1 and reported.notes[0].startswith(
        f"{made[1]}: has no lock of specrt and was not changed"
    )


@pytest.mark.parametrize(
    ("boot", "age_s", "is_removed"), [("here", 0, True), ("other", 0, False), ("other", 9e5, True)]
)
def test_a_lock_of_another_machine_is_believed_for_a_day(
    tmp_path: Path, boot: str, age_s: float, is_removed: bool
) -> None:
    left = tmp_path / ".bundle.partial-abcdefgh"
    left.mkdir()
    (left / LOCK_NAME).write_text(folders._boot_id() if boot == "here" else boot)
    then = time.time() - age_s
    for path in (left / LOCK_NAME, left):
        os.utime(path, (then, then))
    clear_leftovers(tmp_path / "bundle")
    assert left.exists() != is_removed


def test_a_folder_taken_for_a_leftover_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process removes it between the two system calls."""
    flock = folders.fcntl.flock
    taken: list[Path] = []

    def late(handle: int, flags: int) -> None:
        if not taken:
            (path,) = tmp_path.iterdir()
            taken.append(path)
            shutil.rmtree(path)
        flock(handle, flags)

    monkeypatch.setattr(folders.fcntl, "flock", late)
    with locked_folder(tmp_path / "bundle", "partial") as folder:
        assert folder.exists() and folder != taken[0]


@pytest.mark.parametrize("failure", [OSError(28, "full"), KeyboardInterrupt()])
def test_a_block_that_fails_leaves_nothing_and_what_was_there_before(tmp_path: Path, failure: BaseException) -> None:
    with pytest.raises(type(failure)), new_folder(tmp_path / "a" / "b" / "bundle"):
        raise failure
    assert list(tmp_path.iterdir()) == []
    place = tmp_path / "bundle"
    place.mkdir()
    (place / "old").touch()
    with pytest.raises(type(failure)), new_folder(place):
        raise failure
    assert sorted(tmp_path.rglob("*")) == [place, place / "old"]


def test_a_failed_rename_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, rename = tmp_path / "bundle", Path.rename
    place.mkdir()
    (place / "old").touch()

    def fail(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="Input/output"), new_folder(place):
        pass
    assert sorted(tmp_path.rglob("*")) == [place, place / "old"]


@pytest.mark.parametrize("name", ["n" * 240, "é" * 120], ids=["ascii", "bytes count"])
def test_a_name_may_be_as_long_as_the_disk_allows(tmp_path: Path, name: str) -> None:
    with new_folder(tmp_path / name):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with pytest.raises(ResourceError, match="File name too long"):
        check_place(tmp_path / ("n" * 256))


def test_a_trial_leaves_nothing(tmp_path: Path) -> None:
    check_place(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
