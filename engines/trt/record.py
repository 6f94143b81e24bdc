"""``engines/<backend>/build.json`` in a bundle: the built engines, their library, GPUs and source graphs.

``bundle.json`` lists the files of the export and is not changed; a build has a separate record next to its engines. An
engine is native code for one version of its library and for the GPUs that it was built for. All of that is checked
before an engine is passed to the library.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from specrt.engines.codec import from_json, to_json
from specrt.engines.contract import ROWS, WIDTH
from specrt.engines.errors import BackendError, BundleError, ResourceError
from specrt.engines.manifest import Manifest
from specrt.engines.storage.files import write_text_file
from specrt.engines.storage.home import cache_dir
from specrt.engines.storage.integrity import sha256_of
from specrt.engines.trt.profiles import PREFILL, VERIFY

RECORD_VERSION = 3
RECORD_NAME = "build.json"
TIMING_CACHE_NAME = "timing.cache"


@dataclass(frozen=True)
class Candidate:
    """An engine that was built and measured: its weights, and what a pass of one token copies of the KV cache."""

    profiles: tuple[str, ...]
    weights_bytes: int
    copied_bytes: int


@dataclass(frozen=True)
class EngineEntry:
    """An engine. ``sources`` are SHA-256 of graph and weights by file; sizes of ``profiles`` are (min, opt, max).

    ``candidates`` decided whether it has ``decode`` (``specrt.engines.trt.decode``); none where nothing was measured.
    """

    file: str
    sources: dict[str, str]
    precision: str
    profiles: dict[str, dict[str, tuple[int, ...]]]
    num_bytes: int
    sha256: str
    build_seconds: float
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True)
class BuildRecord:
    """The content of ``build.json``. ``compute_capabilities`` are all on which the engines run."""

    record_version: int
    specrt_version: str
    created_utc: str
    backend: str
    builder: str
    builder_version: str
    compute_capabilities: tuple[str, ...]
    engines: dict[str, EngineEntry]

    def runs_on(self, compute_capability: str) -> bool:
        """Whether a GPU of this compute capability (as in ``8.9``) runs the engines."""
        return compute_capability in self.compute_capabilities


def engines_folder(bundle: Path, backend: str) -> Path:
    """The folder of the engines of ``backend`` in a bundle."""
    return bundle / "engines" / backend


def build_command(bundle: Path, backend: str, force: bool = True) -> str:
    """The command that builds the engines (again)."""
    return f"specrt build {bundle} --backend {backend}{' --force' if force else ''}"


def record_text(record: BuildRecord) -> str:
    """The content of ``build.json``."""
    return json.dumps(to_json(record), indent=1) + "\n"


def record_from_bundle(bundle: Path, backend: str) -> BuildRecord:
    """Read ``build.json``. Raises ``BackendError`` if it does not exist, ``BundleError`` if it is damaged."""
    path = engines_folder(bundle, backend) / RECORD_NAME
    if not path.is_file():
        raise BackendError(
            f"{bundle}: no engines for {backend} are built; build them with '{build_command(bundle, backend, False)}'"
        )
    fix = f"build them again with '{build_command(bundle, backend)}'"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version = data.get("record_version") if isinstance(data, dict) else None
        if version != RECORD_VERSION:
            raise ValueError(f"record version {version!r}, this specrt reads {RECORD_VERSION}")
        return from_json(BuildRecord, data)
    except (ValueError, OSError, RecursionError) as error:
        raise BundleError(f"{path}: {error}; {fix}") from error


def check_build(
    bundle: Path, manifest: Manifest, record: BuildRecord, version: str, capability: str | None
) -> list[str]:
    """Raise unless the engines fit this bundle, library ``version`` and GPU; return warnings.

    ``capability`` is the GPU's compute capability, None if it is not known. Raises ``BackendError`` for another
    library or GPU and for profiles that are too narrow, ``BundleError`` for engines of another export, and for files
    that are missing or damaged.
    """
    folder = engines_folder(bundle, record.backend)
    fix = f"build them again with '{build_command(bundle, record.backend)}'"
    if version != record.builder_version:
        raise BackendError(
            f"{folder}: engines are for {record.builder} {record.builder_version}, found {version}; {fix}"
        )
    if capability is not None and not record.runs_on(capability):
        built_for = ", ".join(record.compute_capabilities)
        raise BackendError(
            f"{folder}: engines are for compute capability {built_for}, this GPU has {capability}; {fix}"
        )
    _check_profiles(folder, manifest, record, fix)
    for name, engine in record.engines.items():
        for source, digest in engine.sources.items():
            entry = manifest.files.get(source)
            if entry is None or entry.sha256 != digest:
                raise BundleError(f"{folder}: engine {name} was built from another {source}; {fix}")
        _check_file(folder / engine.file, engine, fix)
    return (
        [] if was_built_here(record) else [f"{folder}: these engines are native code that this machine did not build"]
    )


def _check_file(path: Path, engine: EngineEntry, fix: str) -> None:
    if not path.is_file():
        raise BundleError(f"{path}: missing; {fix}")
    if path.stat().st_size != engine.num_bytes:
        raise BundleError(f"{path}: {path.stat().st_size} bytes, expected {engine.num_bytes}; {fix}")
    digest = sha256_of(path)
    if digest != engine.sha256:
        raise BundleError(f"{path}: SHA-256 is {digest[:12]}…, expected {engine.sha256[:12]}…; {fix}")


def _check_profiles(folder: Path, manifest: Manifest, record: BuildRecord, fix: str) -> None:
    """Every pass of the bundle must fit a profile. The library's own error about profiles is unclear."""
    for name, entry in (("target", manifest.target), ("draft", manifest.draft.model)):
        if entry is None:
            continue
        if name not in record.engines:
            raise BundleError(f"{folder}: no engine for the {name}; {fix}")
        profiles = record.engines[name].profiles
        for profile, dim, needed in ((PREFILL, WIDTH, entry.spec.max_width), (VERIFY, ROWS, entry.spec.max_rows)):
            largest = profiles.get(profile, {}).get(dim, (0,))[-1]
            if needed > largest:
                raise BackendError(
                    f"{folder}: engine {name}, profile {profile} is built for {largest} {dim} and the bundle's passes "
                    f"have up to {needed}; {fix}"
                )


def remember_build(record: BuildRecord) -> None:
    """Record that this machine built the engines of ``record``. Without that, loading prints a warning."""
    path = cache_dir() / "builds.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_file(path, json.dumps(sorted({*_built_here(), *_digests(record)})))
    except (OSError, ResourceError):
        return  # a read-only home


def was_built_here(record: BuildRecord) -> bool:
    """Whether every engine of ``record`` was built on this machine, as recorded by ``remember_build``."""
    return _digests(record) <= _built_here()


def _digests(record: BuildRecord) -> set[str]:
    return {engine.sha256 for engine in record.engines.values()}


def _built_here() -> set[str]:
    try:
        return set(json.loads((cache_dir() / "builds.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return set()
