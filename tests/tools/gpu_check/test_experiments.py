"""The bodies of the experiments on a simulated GPU: they pass on what is right, and find what is wrong."""

from __future__ import annotations

import functools
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrt.engines.contract import LOGITS
from specrt.engines.errors import BackendError
from specrt.engines.gpu import device, graphs
from specrt.engines.gpu.device import Device
from specrt.engines.ort import cuda as ort_cuda
from specrt.engines.trt.engine import TrtBackend
from specrt.tools.gpu_check.experiment import FAILED, PASSED, SKIPPED
from specrt.tools.gpu_check.experiments import speed, texts
from specrt.tools.gpu_check.experiments.driver import check_driver
from specrt.tools.gpu_check.experiments.logits import check_logits, check_widths
from specrt.tools.gpu_check.experiments.rtx import check_rtx
from specrt.tools.gpu_check.experiments.samplers import check_samplers
from specrt.tools.gpu_check.experiments.speed import check_layers, check_round_graph
from specrt.tools.gpu_check.experiments.texts import check_memory, check_onnxruntime
from specrt.tools.gpu_check.kit import Kit
from tests.engines.gpu.simulated_cuda import SimulatedCuda
from tests.engines.gpu.simulated_gpu import SimulatedGpu
from tests.engines.ort.simulated_ort import SimulatedOrt
from tests.engines.trt.simulated_trt import IExecutionContext
from tests.engines.trt.support.library_types import IRuntimeCache
from tests.exports import Exports
from tests.tools.gpu_check.performing import performed, view


def test_the_driver_does_what_the_runtime_assumes(simulated: SimulatedGpu) -> None:
    verdict, reason, figures = performed(check_driver, Kit())
    assert (verdict, reason) == (PASSED, ""), reason
    assert figures["gpu"] == {"name": "simulated GPU", "compute capability": "8.9"}
    assert figures["ms of 50 copies of 128 KB"] > 0
    assert simulated.cuda.sizes == {}, "all memory is given back"


def test_an_event_that_is_not_ready_must_be_no_error(simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    elapsed = SimulatedCuda.elapsed_ms

    def raises(self: SimulatedCuda, first: Any, last: Any) -> float | None:
        if (found := elapsed(self, first, last)) is None:
            raise BackendError("cudaErrorNotReady")
        return found

    monkeypatch.setattr(SimulatedCuda, "elapsed_ms", raises)
    verdict, reason, _ = performed(check_driver, Kit())
    assert (verdict, reason) == (FAILED, "cudaErrorNotReady")


def test_a_driver_that_runs_what_is_captured_is_found(simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = simulated.cuda.capture

    def eager(enqueue: Any) -> Any:
        enqueue()
        return capture(enqueue)

    monkeypatch.setattr(simulated.cuda, "capture", eager)
    verdict, reason, _ = performed(check_driver, Kit())
    assert (verdict, reason.partition(":")[0]) == (FAILED, "memory after a capture alone")


def test_uploads_that_are_read_too_late_are_found(simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that uses its page-locked memory again without a wait."""

    def careless(self: Device, address: int, data: Any) -> None:
        self._uploads.bytes[: data.size] = data
        self.api.upload(address, self._uploads.address, data.size)

    monkeypatch.setattr(Device, "_upload", careless)
    verdict, reason, _ = performed(check_driver, Kit())
    assert verdict == FAILED
    assert reason.startswith("upload 0 of 64")


def test_rtx_loads_an_engine_or_gives_its_words(simulated: SimulatedGpu) -> None:
    if simulated.backend != "tensorrt-rtx":
        pytest.skip("of TensorRT-RTX alone")
    kit = Kit(standard=simulated.bundle)
    verdict, reason, figures = performed(check_rtx, kit)
    assert (verdict, reason) == (PASSED, ""), reason
    assert figures["largest logit"] > 0
    (simulated.bundle / "engines" / simulated.backend / "target.engine").write_bytes(b"of another machine")
    verdict, reason, figures = performed(check_rtx, kit)
    assert (verdict, figures["its words"]) == (FAILED, ["the engine is corrupt"])
    shutil.rmtree(simulated.bundle / "engines")
    verdict, reason, _ = performed(check_rtx, kit)
    assert (verdict, "has no engines for TensorRT-RTX" in reason) == (SKIPPED, True)


def test_logits_and_bits(simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(standard=simulated.bundle)
    verdict, reason, figures = performed(check_logits, kit)
    assert (verdict, reason) == (PASSED, ""), reason
    errors = figures[simulated.backend]["error over the largest logit"]
    assert len(errors) == simulated.manifest.target.spec.max_rows + 2
    assert all(0 <= error < 0.02 for error in errors.values())
    verdict, reason, figures = performed(check_widths, kit)
    assert verdict == PASSED, reason
    execute = IExecutionContext.execute_async_v3

    def rounded(self: IExecutionContext, stream: int) -> bool:
        """Bits that depend on the width, as with kernels that split their sums."""
        done = execute(self, stream)
        rows = self.shapes["row_indices"][0]
        if "logits" in {tensor.name for tensor in self.engine.contract.outputs} and rows == 2:
            logits = view(self.addresses[LOGITS], (rows, 1), "float32")

            def nudge() -> None:
                logits[:] = np.nextafter(logits, np.float32(np.inf))

            simulated.cuda.enqueue(nudge)
        return done

    monkeypatch.setattr(IExecutionContext, "execute_async_v3", rounded)
    verdict, reason, _ = performed(check_widths, kit)
    assert verdict == FAILED
    assert "rows differ in their bits" in reason


def test_a_cache_that_is_not_in_place_is_found(simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    execute = IExecutionContext.execute_async_v3

    def spilled(self: IExecutionContext, stream: int) -> bool:
        done = execute(self, stream)
        past = next((t for t in self.engine.contract.inputs if t.name == "past_value.1"), None)
        if past is not None:
            keys = view(self.addresses["past_value.1"], past.resolve({}), "float16")

            def spill() -> None:
                keys[0, :, -1] = 1

            simulated.cuda.enqueue(spill)
        return done

    monkeypatch.setattr(IExecutionContext, "execute_async_v3", spilled)
    verdict, reason, _ = performed(check_logits, Kit(standard=simulated.bundle))
    assert verdict == FAILED
    assert "layer 1: 49 slots of its value cache are written, expected the first 48" in reason


def test_times_of_layers(simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny bundle stands for them: what is measured is the same."""
    monkeypatch.setattr(speed, "START", 8)
    kit = Kit(layers=simulated.bundle)
    verdict, reason, figures = performed(check_layers, kit)
    assert (verdict, reason) == (PASSED, ""), reason
    layers = figures[simulated.backend]
    for name in ("CUDA graphs", "no CUDA graphs"):
        assert list(layers[name]["ms by width"]) == list(layers[name]["v(M)"]) == [1, 2, 3, 4]
        assert layers[name]["host us a pass"] > 0 and layers[name]["GB/s at width 1"] > 0
        assert "launch gap us" in layers[name]
    assert layers["ms by kernel at width 1"] == {"attention": 0.25, "head": 0.25}
    assert simulated.cuda.graphs
    monkeypatch.setattr(SimulatedCuda, "elapsed_ms", lambda *_: None)
    verdict, reason, _ = performed(check_layers, kit)
    assert (verdict, reason) == (FAILED, "events: None ms between the marks around 10 passes")


def test_a_round_as_one_graph(simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(standard=simulated.bundle)
    verdict, reason, figures = performed(check_round_graph, kit)
    assert (verdict, reason) == (PASSED, ""), reason
    assert len(figures[simulated.backend]) == 3
    assert all(ms > 0 for ms in figures[simulated.backend].values())
    monkeypatch.setattr(simulated.cuda, "can_capture", False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each pass says so too
        verdict, reason, _ = performed(check_round_graph, kit)
    assert verdict == FAILED
    assert "a round cannot be captured as one CUDA graph" in reason


def test_memory_in_steady_state(simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(standard=simulated.bundle)
    verdict, reason, figures = performed(check_memory, kit)
    assert (verdict, reason) == (PASSED, ""), reason
    found = figures[simulated.backend]
    assert found["texts with equal ids"] == 12
    assert found["bytes that memory grew by in steady state"] == 0 or found["graphs captured meanwhile"] > 0
    assert 0 < found["median ms between pieces"] <= found["longest ms between pieces"]
    assert found["ms a token, graphs of rounds"] > 0
    assert found["ms a token, no graphs"] > 0
    assert found["s to the first text of the second load"] > 0
    if simulated.backend == "tensorrt-rtx":
        assert found["bytes of compiled kernels after the second load"] > 100
        with monkeypatch.context() as patched:
            patched.setattr(IRuntimeCache, "deserialize", lambda self, blob: False)
            verdict, reason, _ = performed(check_memory, kit)
        assert (verdict, "the second load did not take the first one's kernels" in reason) == (FAILED, True)
    leaked = iter(range(1 << 20, 0, -4096))
    monkeypatch.setattr(SimulatedCuda, "free_memory", lambda self: next(leaked))
    monkeypatch.setattr(TrtBackend, "uses_graphs", False)  # a late capture would be allowed to take memory
    verdict, reason, _ = performed(check_memory, kit)
    assert verdict == FAILED
    assert "memory grew by 4096 bytes" in reason


def test_graphs_that_give_other_ids_are_found(simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that a graph copies from another place: every token is the id 5."""
    answers = graphs._Area.answers

    def wrong(self: graphs._Area, tensors: Any) -> Any:
        found = answers(self, tensors)
        return [found[0], np.full_like(found[1], 5), *found[2:]] if len(found) > 1 else found

    monkeypatch.setattr(graphs._Area, "answers", wrong)
    monkeypatch.setattr(texts, "_threads_of", lambda *_: {"bytes that memory grew by in steady state": 0})
    verdict, reason, _ = performed(check_memory, Kit(standard=simulated.bundle))
    assert verdict == FAILED
    assert "rounds as CUDA graphs give" in reason


@pytest.fixture
def half(exports: Exports) -> Path:
    """A tiny bundle in fp16 that drafts for itself."""
    return exports.bundle(exports.model(), "self", 3, max_seq_len=96, prefill_chunk=32, dtype="fp16")


def test_onnxruntime_on_cuda(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimulatedCuda()
    opened, module = Device(cuda), SimulatedOrt(cuda)
    monkeypatch.setattr(ort_cuda, "ort", module)
    monkeypatch.setattr(ort_cuda, "check_provider", functools.cache(ort_cuda.check_provider.__wrapped__))
    for place in (device, ort_cuda):
        monkeypatch.setattr(place, "open_device", lambda ordinal=0: opened)
    kit = Kit(onnxruntime=half)
    verdict, reason, figures = performed(check_onnxruntime, kit)
    assert (verdict, reason) == (PASSED, ""), reason
    assert set(figures["waits a round"]) == {1}
    for check in (check_samplers, check_logits, check_widths):
        assert performed(check, kit)[0] == PASSED
    module.on_cpu.add("match.onnx")
    verdict, reason, figures = performed(check_onnxruntime, kit)
    assert verdict == FAILED
    assert "match.onnx: some of it runs on the CPU" in reason
    module.available = ("CPUExecutionProvider",)
    ort_cuda.check_provider.cache_clear()
    verdict, reason, _ = performed(check_onnxruntime, kit)
    assert (verdict, "no CUDAExecutionProvider" in reason) == (SKIPPED, True)


def test_a_bundle_that_no_backend_opens_is_skipped_with_every_reason(
    simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrtBackend, "__init__", refuse)
    verdict, reason, figures = performed(check_samplers, Kit(standard=simulated.bundle))
    assert (verdict, reason) == (SKIPPED, "this card is refused")
    assert figures["not opened"] == {simulated.backend: "this card is refused"}


def refuse(self: TrtBackend, name: str, bundle: Path, threads: int | None = None) -> None:
    raise BackendError("this card is refused")
