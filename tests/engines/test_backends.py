"""The table of backends: every row opens a ``Backend``, and what a bundle or a device does not have is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specrt.engines.backends import BACKENDS, RUNS_BUNDLES_OF, choose_backend, choose_device, open_backend
from specrt.engines.contract import DIALECTS, model_contract
from specrt.engines.errors import BackendError, UsageError
from specrt.engines.interface import CPU, CUDA, DEVICES
from specrt.engines.manifest import manifest_from_bundle


def test_every_backend_that_bundles_are_exported_for_is_in_the_table() -> None:
    assert BACKENDS.keys() == DIALECTS.keys() | RUNS_BUNDLES_OF.keys()
    assert set(RUNS_BUNDLES_OF.values()) <= DIALECTS.keys()
    assert {device for devices in BACKENDS.values() for device in devices} == set(DEVICES)


@pytest.mark.parametrize(
    ("backend", "wanted", "device"),
    [
        ("onnxruntime", None, CPU),
        ("onnxruntime", CUDA, CUDA),
        ("tensorrt", None, CUDA),
        ("tensorrt-rtx", CUDA, CUDA),
        ("onnxruntime-rtx", None, CUDA),
    ],
)
def test_the_first_device_of_a_backend_is_its_default(backend: str, wanted: str | None, device: str) -> None:
    assert choose_device(backend, wanted) == device


def test_a_device_that_a_backend_does_not_run_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match="device cpu: backend tensorrt runs on a GPU only; leave the device out"):
        choose_device("tensorrt", CPU)
    monkeypatch.setitem(BACKENDS, "other", {CPU: BACKENDS["onnxruntime"][CPU]})
    with pytest.raises(BackendError, match="device cuda: backend other runs on the CPU only; leave the device out"):
        choose_device("other", CUDA)
    with pytest.raises(UsageError, match="device: got 'tpu', expected one of cpu, cuda"):
        choose_device("other", "tpu")


def test_a_backend_loads_graphs_by_their_names_in_the_bundle(tiny_bundle: Path) -> None:
    """With its default number of threads, or with a given one."""
    from specrt.engines.ort.cpu import OrtBackend, OrtEngine

    manifest = manifest_from_bundle(tiny_bundle)
    backend = open_backend(tiny_bundle, manifest, threads=2)
    assert isinstance(backend, OrtBackend)
    assert (backend.name, backend.device) == ("onnxruntime", CPU)
    contract = model_contract(manifest.target.spec)
    for asked, expected in ((None, 2), (1, 1)):
        engine = backend.load(manifest.target.graph, contract, asked)
        assert isinstance(engine, OrtEngine)
        assert engine.session.get_session_options().intra_op_num_threads == expected


def test_a_backend_that_the_bundle_is_not_for_is_refused(tiny_bundle: Path) -> None:
    with pytest.raises(BackendError, match="backend tensorrt: this bundle was exported for onnxruntime; export again"):
        open_backend(tiny_bundle, manifest_from_bundle(tiny_bundle), "tensorrt")


def test_a_backend_that_no_bundle_lists_runs_those_of_another(tiny_bundle: Path) -> None:
    manifest = manifest_from_bundle(tiny_bundle)
    assert choose_backend(manifest, None) == "onnxruntime"
    assert choose_backend(manifest, "onnxruntime-rtx") == "onnxruntime-rtx"
    assert "onnxruntime-rtx" not in manifest.backends
    other = replace(manifest, backends=("tensorrt-rtx", "tensorrt"))
    with pytest.raises(BackendError, match="exported for tensorrt-rtx, tensorrt; export again with --backend onnxrun"):
        choose_backend(other, "onnxruntime-rtx")
