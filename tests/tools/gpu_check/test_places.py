"""Which bundle of the kit a library runs: the older dialect where it lacks what the current one needs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from specrt.engines.contract import STANDARD_DIALECT
from specrt.engines.errors import BackendError
from specrt.engines.manifest import manifest_from_bundle
from specrt.engines.trt.library import LIBRARIES
from specrt.tools.gpu_check.experiment import PASSED, SKIPPED, Notes, perform
from specrt.tools.gpu_check.experiments import places
from specrt.tools.gpu_check.experiments.logits import check_logits, check_widths
from specrt.tools.gpu_check.experiments.speed import check_round_graph
from specrt.tools.gpu_check.kit import Kit
from tests.engines.gpu.simulated_gpu import SimulatedGpu
from tests.engines.numpy_samplers.noisy_pair import K
from tests.engines.trt.test_swapped_cache import OLD
from tests.exports import Exports


@pytest.fixture
def jetson(exports: Exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    """A simulated TensorRT 10.3, which has no KV cache updates, with a tiny pair of its dialect."""
    bundle = exports.bundle(exports.model(), "self:int8", K, **OLD)
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(places, "LIBRARIES", {"tensorrt": LIBRARIES["tensorrt"]})
    made = SimulatedGpu(Path(shutil.copytree(bundle, tmp_path / "bundle")), "tensorrt", monkeypatch)

    def load(name: str, dialect: str) -> Any:
        if dialect == STANDARD_DIALECT:
            raise BackendError("no KV cache updates")
        return made.library

    monkeypatch.setattr(places, "load_library", load)
    return made


def test_an_older_library_runs_the_older_dialect(jetson: SimulatedGpu, tiny_tensorrt_bundle: Path) -> None:
    kit = Kit(standard=tiny_tensorrt_bundle, standard_22=jetson.bundle)
    for check in (check_logits, check_widths, check_round_graph):
        notes = Notes()
        assert perform(check, kit, notes) == (PASSED, ""), check.__name__
        assert list(notes.figures) == ["tensorrt"]
    verdict = perform(check_logits, Kit(standard=tiny_tensorrt_bundle), Notes())
    assert verdict == (SKIPPED, "no KV cache updates")
    alone = Kit(standard=jetson.bundle)  # a bundle in place of a kit
    assert manifest_from_bundle(jetson.bundle).target.spec.dialect != STANDARD_DIALECT
    assert perform(check_logits, alone, Notes()) == (PASSED, "")
