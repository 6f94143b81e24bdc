"""A bundle for TensorRT on the simulated GPU, and the same graphs on ONNX Runtime, to compare with."""

from __future__ import annotations

import datetime
import hashlib
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import specrt
from specrt.engines import backends
from specrt.engines.contract import Contract
from specrt.engines.gpu import device, driver
from specrt.engines.interface import CPU
from specrt.engines.manifest import Manifest, manifest_from_bundle
from specrt.engines.trt import engine
from specrt.engines.trt.build import _jobs
from specrt.engines.trt.library import LIBRARIES
from specrt.engines.trt.record import (
    RECORD_NAME,
    RECORD_VERSION,
    BuildRecord,
    EngineEntry,
    engines_folder,
    record_text,
    remember_build,
)
from specrt.runtime.runtime import Runtime
from tests.engines.gpu.simulated_cuda import SimulatedCuda
from tests.engines.trt.simulated_trt import Library


def write_engines(bundle: Path, backend: str, version: str, has_decode_profile: bool = False) -> dict[str, Contract]:
    """Engine files that name their graphs, with the record that a build would write; the contract of each graph."""
    manifest = manifest_from_bundle(bundle)
    folder, engines, contracts = engines_folder(bundle, backend), {}, {}
    for job in _jobs(manifest, has_decode_profile):
        graph, profiles = bundle / job.graph, job.profiles
        contracts[str(graph)] = job.contract
        plan = json.dumps({"graph": str(graph), "profiles": profiles}).encode()
        path = folder / f"{job.name}.engine"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(plan)
        sources = job.sources(manifest)
        digest = hashlib.sha256(plan).hexdigest()
        engines[job.name] = EngineEntry(f"{job.name}.engine", sources, job.precision, profiles, len(plan), digest, 0.0)
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    record = BuildRecord(RECORD_VERSION, "0", created, backend, LIBRARIES[backend].module, version, ("8.9",), engines)
    (folder / RECORD_NAME).write_text(record_text(record), encoding="utf-8")
    remember_build(record)
    return contracts


class SimulatedGpu:
    """A simulated GPU with a TensorRT, and a bundle with engines for it."""

    def __init__(self, bundle: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bundle, self.backend, self.cuda = bundle, backend, SimulatedCuda()
        is_rtx = backend == "tensorrt-rtx"
        version = "1.7.1" if is_rtx else "10.15.1"
        self.contracts = write_engines(bundle, backend, version)
        self.library = Library(self.cuda, self.contracts, is_rtx)
        self.device = device.Device(self.cuda)
        monkeypatch.setattr(driver, "open_cuda", lambda ordinal=0: self.cuda)
        for module in (device, engine):
            monkeypatch.setattr(module, "open_device", lambda ordinal=0: self.device)
        monkeypatch.setattr(engine, "load_library", lambda backend, dialect: self.library)

    @property
    def manifest(self) -> Manifest:
        return manifest_from_bundle(self.bundle)

    @contextmanager
    def open(self) -> Iterator[Runtime]:
        """The bundle on the simulated GPU; everything is given back at the end."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with specrt.load(self.bundle, backend=self.backend) as runtime:
                yield runtime

    @contextmanager
    def on_cpu(self) -> Iterator[Runtime]:
        """The same graphs on ONNX Runtime, all memory the host's."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(backends.BACKENDS, self.backend, {CPU: backends.BACKENDS["onnxruntime"][CPU]})
            with specrt.load(self.bundle, backend=self.backend, threads=1) as runtime:
                yield runtime
