"""``specrt compare``: ONNX Runtime against numpy and stored logits, and a simulated GPU against ONNX Runtime."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrt.engines import numpy_samplers
from specrt.engines.contract import INPUT_IDS, POSITION_IDS, ROW_INDICES
from specrt.engines.interface import Array
from specrt.engines.manifest import manifest_from_bundle
from specrt.engines.samplers import SAMPLER_NAMES
from specrt.tools.compare import compare as module
from specrt.tools.compare import graphs
from specrt.tools.compare.compare import compare
from specrt.tools.compare.graphs import Feed, Graph, graphs_of, passes_of
from tests.conftest import has_nvidia_gpu
from tests.engines.gpu.simulated_gpu import SimulatedGpu
from tests.engines.trt.simulated_trt import IExecutionContext
from tests.exporter.heads.pairs import head_bundle
from tests.exports import Exports
from tests.tools.commands import invoke

without_gpu = pytest.mark.skipif(has_nvidia_gpu(), reason="a GPU is there")


@without_gpu
def test_onnxruntime_against_numpy_and_stored_logits(tiny_tensorrt_bundle: Path) -> None:
    result = invoke("compare", tiny_tensorrt_bundle, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert "no GPU was used" in found["notes"][0]
    assert found["second"] == "onnxruntime on the CPU"
    paths = {entry["graph"] for entry in found["results"]}
    manifest = manifest_from_bundle(tiny_tensorrt_bundle)
    assert paths >= {*manifest.target.samplers.values(), manifest.target.graph}
    assert len(paths) == len(SAMPLER_NAMES) + 2
    assert all(entry["passed"] for entry in found["results"])
    logits = [entry for entry in found["results"] if entry["output"] == "logits"]
    assert all(0 < entry["max_abs_difference"] < entry["tolerance"] for entry in logits)
    text = invoke("compare", tiny_tensorrt_bundle, "--verbose")
    assert "samplers/match.onnx" in text.stdout and "passed" in text.stdout
    assert "Accuracy Summary" in text.stderr and "Accuracy" not in text.stdout


@without_gpu
def test_a_reference_that_differs_is_an_error(tiny_tensorrt_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def last(logits: Array) -> Any:
        return logits.shape[-1] - 1 - np.argmax(logits[:, ::-1], axis=-1)

    monkeypatch.setattr(numpy_samplers, "greedy", last)
    result = invoke("compare", tiny_tensorrt_bundle)
    assert result.exit_code == 1
    assert "outputs differ: samplers/match.onnx: tokens" in result.stderr
    assert "FAILED" in result.stdout


@without_gpu
def test_logits_of_a_head_give_no_warning(exports: Exports, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its -1e30 for ids that it does not draft. As the control, one of them that is finite elsewhere differs."""
    bundle = head_bundle(exports)
    monkeypatch.setattr(graphs, "SAMPLER_NAMES", ("match",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = compare(bundle)
    head = manifest_from_bundle(bundle).draft.model
    assert head is not None and found.failed == []
    assert head.graph in {result.graph for result in found.results}

    def with_other_bans(*_: Any, **__: Any) -> Iterator[Graph]:
        for graph in graphs_of(bundle, manifest_from_bundle(bundle), has_reference=True):

            def reference(feed: Feed, graph: Graph = graph) -> Feed:
                return {name: np.maximum(values, -9e29) for name, values in graph.reference(feed).items()}

            yield replace(graph, reference=reference)

    monkeypatch.setattr(module, "graphs_of", with_other_bans)
    assert compare(bundle).failed == [f"{head.graph}: logits"]


@without_gpu
@pytest.mark.parametrize("backend", ["tensorrt-rtx", "tensorrt"])
def test_a_tensorrt_backend_needs_a_gpu(tiny_tensorrt_bundle: Path, backend: str) -> None:
    result = invoke("compare", tiny_tensorrt_bundle, "--backend", backend)
    assert (result.exit_code, result.stdout) == (9, "")


def test_a_bundle_names_its_backends(tiny_bundle: Path) -> None:
    assert invoke("compare", tiny_bundle, "--backend", "tensorrt").exit_code == 9


def test_a_gpu_against_onnxruntime(tiny_tensorrt_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
    bundle = Path(shutil.copytree(tiny_tensorrt_bundle, tmp_path / "bundle"))
    simulated = SimulatedGpu(bundle, "tensorrt", monkeypatch)
    monkeypatch.setattr(module, "open_device", lambda: simulated.device)
    found = compare(bundle, "tensorrt")
    assert (found.first, found.second) == ("onnxruntime on the CPU", "tensorrt on a GPU")
    assert (found.failed, found.notes) == ([], ())
    passes = {result.graph: result.passes for result in found.results if result.output == "logits"}
    assert min(passes.values()) > 12, "of each width in turn"
    execute = IExecutionContext.execute_async_v3

    def skipped(self: IExecutionContext, stream: int) -> bool:
        """An engine of the target that leaves its outputs as they are."""
        is_target = Path(self.engine.graph).parts[-2] == "target"
        return True if is_target and self.shapes["input_ids"][1] == 2 else execute(self, stream)

    monkeypatch.setattr(IExecutionContext, "execute_async_v3", skipped)
    monkeypatch.setattr(graphs, "SAMPLER_NAMES", ("match",))
    assert compare(bundle, "tensorrt").failed == [f"{simulated.manifest.target.graph}: logits"]


def test_feeds_wider_than_a_pass_are_cut(tiny_tensorrt_bundle: Path) -> None:
    """The tokens, positions and last rows stay those of the feed."""
    graph = list(graphs_of(tiny_tensorrt_bundle, manifest_from_bundle(tiny_tensorrt_bundle), has_reference=True))[-1]
    contract = graph.contract
    contract.limits["width"] = 5
    for feed in graph.feeds:
        parts = list(passes_of(contract, feed))
        for name in (INPUT_IDS, POSITION_IDS):
            assert np.array_equal(np.concatenate([part[name][0] for part in parts]), feed[name][0])
            assert all(part[name].shape[1] <= 5 for part in parts)
        last = parts[-1]
        assert last[POSITION_IDS][0][last[ROW_INDICES]].tolist() == feed[POSITION_IDS][0][feed[ROW_INDICES]].tolist()
