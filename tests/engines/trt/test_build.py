"""``specrt build`` with TensorRT-RTX's own builder, which needs no GPU: what it makes, records, checks and refuses."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specrt.engines.errors import BackendError, BundleError, ResourceError, SpecrtError, UsageError
from specrt.engines.manifest import manifest_from_bundle
from specrt.engines.samplers import SAMPLER_NAMES
from specrt.engines.storage.integrity import sha256_of
from specrt.engines.trt import build as building
from specrt.engines.trt.build import build
from specrt.engines.trt.record import (
    RECORD_NAME,
    BuildRecord,
    check_build,
    engines_folder,
    record_from_bundle,
    record_text,
)
from tests.progress import KeptProgress, interrupted_at

BACKEND = "tensorrt-rtx"
K, CHUNK = 3, 32  # of the tiny bundle


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECRT_CACHE", str(home))


@pytest.fixture(scope="module")
def steps() -> KeptProgress:
    return KeptProgress()


@pytest.fixture(scope="module")
def built(
    tiny_tensorrt_bundle: Path, home: Path, steps: KeptProgress, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    bundle = tmp_path_factory.mktemp("built") / "bundle"
    shutil.copytree(tiny_tensorrt_bundle, bundle)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECRT_CACHE", str(home))
        build(bundle, BACKEND, progress=steps)
    return bundle


def test_models_and_samplers_become_engines(built: Path, steps: KeptProgress) -> None:
    record = record_from_bundle(built, BACKEND)
    names = ["target", "draft", *(f"samplers/{name}" for name in SAMPLER_NAMES)]
    assert list(record.engines) == names
    assert steps.steps == [f"{name}: building" for name in names]
    assert "GB of disk" in steps.notes[0]
    folder = engines_folder(built, BACKEND)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {RECORD_NAME, *(engine.file for engine in record.engines.values())}
    for engine in record.engines.values():
        path = folder / engine.file
        assert (path.stat().st_size, sha256_of(path)) == (engine.num_bytes, engine.sha256)
        assert engine.build_seconds > 0
        assert engine.sources == {name: sha256_of(built / name) for name in engine.sources}
    assert set(record.engines["target"].sources) == {"target/model.onnx", "target/model.onnx.data"}
    assert record.engines["target"].precision == "float16"


def test_two_profiles_verify_and_prefill(built: Path) -> None:
    record = record_from_bundle(built, BACKEND)
    assert record.engines["target"].profiles == {
        "verify": {"width": (1, K + 1, K + 1), "rows": (1, K + 1, K + 1)},
        "prefill": {"width": (1, CHUNK, CHUNK), "rows": (1, 1, K + 1)},
    }


def test_the_record_names_builder_and_gpus(built: Path) -> None:
    import tensorrt_rtx

    record = record_from_bundle(built, BACKEND)
    assert (record.builder, record.builder_version) == ("tensorrt_rtx", tensorrt_rtx.__version__)
    assert record.compute_capabilities == ("8.0", "8.6", "8.9", "12.0", "12.1")
    capabilities = ("7.5", "8.0", "8.7", "8.9", "9.0", "11.0", "12.1")
    assert [record.runs_on(c) for c in capabilities] == [False, True, False, True, False, False, True]


def _check(
    bundle: Path, record: BuildRecord | None = None, version: str = "", capability: str | None = "8.9"
) -> list[str]:
    record = record or record_from_bundle(bundle, BACKEND)
    return check_build(bundle, manifest_from_bundle(bundle), record, version or record.builder_version, capability)


def test_what_was_built_here_is_taken_as_it_is(built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Elsewhere a user reads that engines are native code."""
    assert _check(built) == []
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path))
    (notice,) = _check(built)
    assert "native code that this machine did not build" in notice


def _edited(bundle: Path, change: Callable[[BuildRecord], BuildRecord]) -> None:
    path = engines_folder(bundle, BACKEND) / RECORD_NAME
    path.write_text(record_text(change(record_from_bundle(bundle, BACKEND))))


def _corrupt(bundle: Path) -> None:
    path = engines_folder(bundle, BACKEND) / "target.engine"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def _cut(bundle: Path) -> None:
    path = engines_folder(bundle, BACKEND) / "samplers" / "match.engine"
    path.write_bytes(path.read_bytes()[:-1])


def _of_another_export(bundle: Path) -> None:
    _edited(
        bundle,
        lambda r: replace(r, engines={n: replace(e, sources={"target/model.onnx": "0"}) for n, e in r.engines.items()}),
    )


DAMAGE: dict[str, tuple[Callable[[Path], Any], type[SpecrtError], str]] = {
    "wrong GPU": (
        lambda b: _edited(b, lambda r: replace(r, compute_capabilities=("12.0",))),
        BackendError,
        "for compute capability 12.0, this GPU has 8.9",
    ),
    "another version": (
        lambda b: _edited(b, lambda r: replace(r, builder_version="1.6.0.1")),
        BackendError,
        "for tensorrt_rtx 1.6.0.1, found",
    ),
    "corrupt engine": (_corrupt, BundleError, "target.engine: SHA-256 is"),
    "truncated engine": (_cut, BundleError, "match.engine: "),
    "missing engine": (
        lambda b: (engines_folder(b, BACKEND) / "draft.engine").unlink(),
        BundleError,
        "draft.engine: missing",
    ),
    "another export": (_of_another_export, BundleError, "built from another target/model.onnx"),
    "damaged record": (
        lambda b: (engines_folder(b, BACKEND) / RECORD_NAME).write_text("{"),
        BundleError,
        "build.json: ",
    ),
    "record of the future": (
        lambda b: (engines_folder(b, BACKEND) / RECORD_NAME).write_text('{"record_version": 9}'),
        BundleError,
        "record version 9, this specrt reads 3",
    ),
    "no engines": (lambda b: shutil.rmtree(b / "engines"), BackendError, "no engines for tensorrt-rtx are built"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_engines_that_do_not_fit_are_refused_in_one_line_with_the_command(
    case: str, built: Path, tmp_path: Path
) -> None:
    import tensorrt_rtx

    damage, kind, message = DAMAGE[case]
    bundle = shutil.copytree(built, tmp_path / "bundle")
    assert _check(bundle) == []
    damage(bundle)
    with pytest.raises(kind, match=message.replace(".", r"\.")) as error:
        _check(bundle, version=tensorrt_rtx.__version__)
    assert "\n" not in str(error.value)
    assert f"specrt build {bundle} --backend {BACKEND}" in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_width": CHUNK + 1}, f"profile prefill is built for {CHUNK} width and .* up to {CHUNK + 1}"),
        ({"max_rows": K + 2}, f"profile verify is built for {K + 1} rows and .* up to {K + 2}"),
    ],
)
def test_passes_beyond_the_profiles_are_refused_before_an_engine_sees_them(
    change: dict[str, Any], message: str, built: Path
) -> None:
    """A longer prompt chunk, a larger K."""
    manifest, record = manifest_from_bundle(built), record_from_bundle(built, BACKEND)
    wider = replace(manifest, target=replace(manifest.target, spec=replace(manifest.target.spec, **change)))
    with pytest.raises(BackendError, match=message):
        check_build(built, wider, record, record.builder_version, None)


def test_engines_are_kept_without_force_and_replaced_with_it(built: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(built, tmp_path / "bundle")
    before = record_from_bundle(bundle, BACKEND)
    with pytest.raises(UsageError, match="--force"):
        build(bundle, BACKEND)
    assert record_from_bundle(bundle, BACKEND) == before
    after = build(bundle, BACKEND, ["8.9", "12.0"], force=True)
    assert after.compute_capabilities == ("8.9", "12.0")
    assert [after.runs_on(capability) for capability in ("8.0", "8.9", "12.0")] == [False, True, True]
    assert [path.name for path in (bundle / "engines").iterdir()] == [BACKEND]
    assert _check(bundle, after) == []


def test_an_interrupted_build_leaves_what_was_there(tiny_tensorrt_bundle: Path, built: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(tiny_tensorrt_bundle, tmp_path / "new")
    with pytest.raises(KeyboardInterrupt):
        build(bundle, BACKEND, progress=interrupted_at("draft: building"))
    assert not (bundle / "engines").exists()
    bundle = shutil.copytree(built, tmp_path / "old")
    with pytest.raises(KeyboardInterrupt):
        build(bundle, BACKEND, force=True, progress=interrupted_at("draft: building"))
    assert _check(bundle) == []


REFUSED: dict[str, tuple[dict[str, Any], type[SpecrtError], str]] = {
    "a backend without engines": ({"backend": "onnxruntime"}, BackendError, "exported for tensorrt-rtx, tensorrt"),
    "an unknown GPU": (
        {"compute_capabilities": ["6.1"]},
        UsageError,
        "knows 7.5, 8.0, .*neither for Jetson nor for Hopper",
    ),
    "TensorRT ahead of time": (
        {"backend": "tensorrt", "compute_capabilities": ["8.9"]},
        UsageError,
        "use tensorrt-rtx",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line_and_nothing_written(case: str, tiny_tensorrt_bundle: Path, tmp_path: Path) -> None:
    options, kind, message = REFUSED[case]
    bundle = shutil.copytree(tiny_tensorrt_bundle, tmp_path / "bundle")
    with pytest.raises(kind, match=message) as error:
        build(**{"bundle": bundle, "backend": BACKEND, **options})
    assert "\n" not in str(error.value)
    assert not (bundle / "engines").exists()


def test_too_little_disk_is_an_error_before_any_work(
    tiny_tensorrt_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    steps = KeptProgress()
    with pytest.raises(ResourceError, match="GB are free"):
        build(tiny_tensorrt_bundle, BACKEND, progress=steps)
    assert steps.steps == []


def test_a_bundle_of_the_other_dialect_has_nothing_to_build(tiny_bundle: Path) -> None:
    with pytest.raises(BackendError, match="export again with --backend tensorrt-rtx"):
        build(tiny_bundle, BACKEND)


def test_a_profile_for_passes_of_one_token_on_request(tiny_tensorrt_bundle: Path, built: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(tiny_tensorrt_bundle, tmp_path / "bundle")
    record = build(bundle, BACKEND, has_decode_profile=True)
    before = record_from_bundle(built, BACKEND).engines
    for name in ("target", "draft"):
        profiles = record.engines[name].profiles
        assert list(profiles) == ["verify", "prefill", "decode"]
        assert profiles["decode"] == {"width": (1, 1, 1), "rows": (1, 1, 1)}
    assert record.engines["target"].num_bytes > before["target"].num_bytes
    assert list(before["target"].profiles) == ["verify", "prefill"]
    assert list(before["draft"].profiles) == ["verify", "prefill", "decode"], "what was measured says so"
    without, having = before["draft"].candidates
    assert (without.profiles, having.profiles) == (("verify", "prefill"), ("verify", "prefill", "decode"))
    assert without.copied_bytes > having.copied_bytes == 0 and without.weights_bytes < having.weights_bytes
    assert before["target"].candidates == record.engines["draft"].candidates == (), "nothing to decide"
    assert record.engines["samplers/match"].profiles == before["samplers/match"].profiles
    assert _check(bundle) == []
