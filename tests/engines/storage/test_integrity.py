"""A bundle's files against its manifest: what is refused, and when a file is hashed again."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from specrt.engines.errors import BundleError
from specrt.engines.manifest import FileEntry, Manifest
from specrt.engines.progress import Progress
from specrt.engines.storage import integrity
from specrt.engines.storage.integrity import CHUNK_BYTES, cache_dir, check_files, sha256_of
from tests.progress import KeptProgress

CONTENTS = {"target/model.onnx": b"graph" * 100, "target/weights.data": bytes(range(256)), "samplers/match.onnx": b""}


class Bundle:
    """A folder of files and the part of a manifest that lists them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        entries = {}
        for name, content in CONTENTS.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
            entries[name] = FileEntry(len(content), hashlib.sha256(content).hexdigest())
        self.manifest = cast(Manifest, SimpleNamespace(files=entries))

    def check(self, always_hash: bool = False) -> None:
        check_files(self.path, self.manifest, always_hash)

    def flip_a_byte(self, name: str = "target/weights.data") -> None:
        content = bytearray((self.path / name).read_bytes())
        content[len(content) // 2] ^= 1
        (self.path / name).write_bytes(content)


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """A bundle, and a hash ledger of this test alone."""
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
    return Bundle(tmp_path / "bundle")


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were hashed, in order."""
    names: list[str] = []

    def spy(path: Path, progress: Progress) -> str:
        names.append(path.name)
        return sha256_of(path, progress)

    monkeypatch.setattr(integrity, "sha256_of", spy)
    return names


def touch(path: Path, later_ns: int) -> None:
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + later_ns))


def test_an_unchanged_bundle_passes(bundle: Bundle) -> None:
    bundle.check()
    bundle.check(always_hash=True)


def test_a_missing_file(bundle: Bundle) -> None:
    (bundle.path / "target/weights.data").unlink()
    with pytest.raises(BundleError, match=r"weights\.data: missing file of the bundle .*; copy the bundle again"):
        bundle.check()


def test_a_folder_in_a_file_s_place(bundle: Bundle) -> None:
    (bundle.path / "samplers/match.onnx").unlink()
    (bundle.path / "samplers/match.onnx").mkdir()
    with pytest.raises(BundleError, match=r"match\.onnx: missing file"):
        bundle.check()


@pytest.mark.parametrize("num_bytes", [0, 255, 257])
def test_a_file_of_another_size(bundle: Bundle, num_bytes: int) -> None:
    os.truncate(bundle.path / "target/weights.data", num_bytes)
    with pytest.raises(BundleError, match=rf"weights\.data: {num_bytes} bytes, expected 256; copy the bundle again"):
        bundle.check()


def test_sizes_are_compared_before_any_file_is_hashed(bundle: Bundle, hashed: list[str]) -> None:
    (bundle.path / "samplers/match.onnx").unlink()
    with pytest.raises(BundleError, match="missing file"):
        bundle.check()
    assert hashed == []


def test_a_flipped_byte_on_first_load(bundle: Bundle) -> None:
    bundle.flip_a_byte()
    with pytest.raises(BundleError, match=r"weights\.data: SHA-256 is .{12}…, expected .{12}…; copy the bundle again"):
        bundle.check()


def test_a_flipped_byte_after_a_good_load_with_a_newer_mtime(bundle: Bundle) -> None:
    bundle.check()
    bundle.flip_a_byte()
    touch(bundle.path / "target/weights.data", later_ns=10**9)
    with pytest.raises(BundleError, match="SHA-256"):
        bundle.check()


def test_a_flipped_byte_after_a_good_load_with_its_mtime_put_back(bundle: Bundle) -> None:
    path = bundle.path / "target/weights.data"
    bundle.check()
    stat = path.stat()
    while path.stat().st_ctime_ns == stat.st_ctime_ns:  # until the file system's clock has ticked
        path.chmod(0o600)
    bundle.flip_a_byte()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(BundleError, match="SHA-256"):
        bundle.check()


def test_a_file_is_hashed_once_and_then_remembered(bundle: Bundle, hashed: list[str]) -> None:
    bundle.check()
    assert hashed == ["model.onnx", "weights.data", "match.onnx"]
    bundle.check()
    assert len(hashed) == 3


def test_long_hashing_reports_its_bytes_before_and_while_it_reads_them(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = sum(map(len, CONTENTS.values()))
    for least, always_hash, expected in ((total, False, total), (total, False, 0), (total, True, total)):
        reported = KeptProgress()
        monkeypatch.setattr(integrity, "LONG_BYTES", least)
        check_files(bundle.path, bundle.manifest, always_hash, reported)
        assert [*zip(reported.steps, reported.totals, strict=True)] == ([("hashing 0.0 GB", total)] if expected else [])
        assert sum(reported.amounts) == expected
    monkeypatch.setattr(integrity, "LONG_BYTES", total + 1)
    reported = KeptProgress()
    check_files(bundle.path, bundle.manifest, True, reported)
    assert reported.steps == []


def test_only_a_touched_file_is_hashed_again(bundle: Bundle, hashed: list[str]) -> None:
    bundle.check()
    hashed.clear()
    touch(bundle.path / "target/model.onnx", later_ns=10**9)
    bundle.check()
    bundle.check()
    assert hashed == ["model.onnx"]


def test_always_hash_does_not_trust_what_is_remembered(bundle: Bundle, hashed: list[str]) -> None:
    bundle.check()
    hashed.clear()
    bundle.check(always_hash=True)
    assert hashed == ["model.onnx", "weights.data", "match.onnx"]


def test_always_hash_finds_damage_that_the_ledger_would_hide(bundle: Bundle) -> None:
    bundle.flip_a_byte()
    path = bundle.path / "target/weights.data"
    stat, entry = path.stat(), bundle.manifest.files["target/weights.data"]
    ledger = {str(path.resolve()): [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, entry.sha256]}
    cache_dir().mkdir()
    (cache_dir() / "verified.json").write_text(json.dumps(ledger), encoding="utf-8")
    bundle.check()
    with pytest.raises(BundleError, match="SHA-256"):
        bundle.check(always_hash=True)


def test_the_hash_of_another_manifest_is_not_trusted(bundle: Bundle) -> None:
    bundle.check()
    bundle.manifest.files["target/weights.data"] = FileEntry(256, "0" * 64)
    with pytest.raises(BundleError, match="expected 000000000000…"):
        bundle.check()


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', "{"])
def test_a_damaged_ledger_only_costs_time(bundle: Bundle, hashed: list[str], content: str) -> None:
    cache_dir().mkdir()
    (cache_dir() / "verified.json").write_text(content, encoding="utf-8")
    bundle.check()
    assert len(hashed) == 3


def test_a_ledger_that_cannot_be_written_only_costs_time(bundle: Bundle, hashed: list[str]) -> None:
    cache_dir().write_text("a file where the folder should be", encoding="utf-8")
    bundle.check()
    bundle.check()
    assert len(hashed) == 6


def test_sha256_reports_the_bytes_it_has_read(tmp_path: Path) -> None:
    content = b"x" * (CHUNK_BYTES + 5)
    (tmp_path / "file").write_bytes(content)
    reported = KeptProgress()
    assert sha256_of(tmp_path / "file", reported) == hashlib.sha256(content).hexdigest()
    assert reported.amounts == [CHUNK_BYTES, 5]


def test_the_cache_is_in_the_home_folder_unless_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SPECRT_CACHE", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "specrt"
    monkeypatch.setenv("SPECRT_CACHE", "")
    assert cache_dir() == tmp_path / ".cache" / "specrt"
