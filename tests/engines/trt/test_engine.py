"""TensorRT's runtime on a simulated GPU: whole generations, their waits and their graphs.

The same graphs run on ONNX Runtime's CPU provider on both sides, so that ids must be equal. What differs is all that is
new: memory that the host cannot see, a stream that runs only at a wait, contexts, graphs.
"""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specrt.engines.gpu.device import Device
from specrt.engines.interface import KEPT_WIDTHS
from specrt.engines.trt.engine import TrtBackend
from specrt.runtime.options import options_of
from specrt.runtime.runtime import Runtime
from specrt.runtime.settings import settings_of
from specrt.tools.rounds import run_rounds
from tests.engines.gpu.simulated_gpu import SimulatedGpu
from tests.engines.numpy_samplers.noisy_pair import NUM_TOKENS, PROMPT, SEEN, WAYS, K, generated
from tests.engines.trt.support.library_types import (
    CudaGraphStrategy,
    DynamicShapesKernelSpecializationStrategy,
)


def test_ids_are_those_of_the_same_graphs_on_the_cpu(simulated: SimulatedGpu) -> None:
    """Each method on a new slot and on a used one, which holds a part of the prompt."""
    ways = {**WAYS, **SEEN}
    with simulated.on_cpu() as runtime:
        expected = {name: generated(runtime, **way) for name, way in ways.items()}
    with simulated.open() as runtime:
        found = {name: generated(runtime, **way) for name, way in ways.items()}
    assert found == expected
    accepted = [expected[name][1] for name in WAYS if name not in ("plain", "ngram")]
    assert any(histogram[K] for histogram in accepted if len(histogram) > K), "some drafts are accepted whole"
    assert any(sum(histogram[:K]) for histogram in accepted), "and some are not"


def counted(simulated: SimulatedGpu, runtime: Runtime, way: dict[str, Any]) -> list[Counter[str]]:
    """The calls of the GPU in each round."""
    options = options_of({"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "num_speculative_tokens": K, **way})  # type: ignore[typeddict-item]
    settings, slot = settings_of(options, runtime.manifest), runtime.open_slot("model")
    marks: list[Counter[str]] = []
    for _ in range(2):  # the second text finds all contexts there
        marks.clear()
        prompt = runtime.codec.encode(PROMPT)
        run_rounds(runtime, slot, prompt, settings, lambda *_: marks.append(simulated.cuda.counts.copy()))
    slot.close()
    return [after - before for before, after in itertools.pairwise(marks[2:])]


@pytest.mark.parametrize("name", [name for name in WAYS if name != "plain"])
def test_the_host_waits_once_a_round_and_allocates_nothing(simulated: SimulatedGpu, name: str) -> None:
    with simulated.open() as runtime:
        rounds = counted(simulated, runtime, WAYS[name])
        vocab_bytes = 4 * runtime.manifest.target.spec.vocab_size
    assert len(rounds) >= 4
    for seen in rounds:
        assert (seen["wait"], seen["allocate"], seen["allocate_pinned"]) == (1, 0, 0), name
        assert seen["download bytes"] < min(vocab_bytes, 400), "ids and the verdict, no row of logits"
        assert seen["upload bytes"] < (K + 2) * 2048, "ids, positions, row indices and uniforms"


@pytest.mark.parametrize("name", ["penalties", "processors"])
def test_what_the_host_must_see_costs_waits(simulated: SimulatedGpu, name: str) -> None:
    """As documented: with penalties or processors each drafted id is read before the next pass."""
    with simulated.open() as runtime:
        assert max(seen["wait"] for seen in counted(simulated, runtime, SEEN[name])) > 1


def outcome(simulated: SimulatedGpu, way: str) -> Any:
    """What is generated on the GPU, or the kind of error that wrong bytes lead to."""
    try:
        with simulated.open() as runtime:
            return generated(runtime, **WAYS[way])
    except Exception as error:
        return type(error)


def test_what_a_late_draft_took_is_measured_by_the_device(simulated: SimulatedGpu) -> None:
    """The controller learns of both models, though the host never waits for the draft."""
    with simulated.open() as runtime:
        result = runtime.generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True)
        assert result.stats.drafted > 0
        estimates = runtime.estimates
        assert estimates.draft.is_known
        assert 0 < estimates.draft.ms(1) < 1e3
        assert estimates.target.ms(1) > 0
    with simulated.on_cpu() as runtime:
        assert runtime.generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True).token_ids == result.token_ids


def test_a_time_that_is_not_known_is_skipped(simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller works without it, and the ids are the same."""
    with simulated.open() as runtime:
        expected = runtime.generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True).token_ids
    monkeypatch.setattr(simulated.cuda, "elapsed_ms", lambda first, last: None)
    with simulated.open() as runtime:
        result = runtime.generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True)
        assert result.token_ids == expected
        assert result.stats.drafted > 0
        assert not runtime.estimates.draft.is_known


def test_a_read_that_does_not_wait_is_noticed(simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the simulation: what is not waited for is not there."""
    with simulated.on_cpu() as runtime:
        expected = generated(runtime, **WAYS["greedy"])
    monkeypatch.setattr(simulated.device, "wait", lambda: None)
    assert outcome(simulated, "greedy") != expected


def test_page_locked_memory_that_is_used_again_too_early_is_noticed(
    simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the uploads: all from one place, as if copies were done at once."""
    upload = Device._upload

    def careless(self: Device, address: int, data: Any) -> None:
        self._used_bytes = 0
        upload(self, address, data)

    with simulated.on_cpu() as runtime:
        expected = generated(runtime, **WAYS["seed"])
    monkeypatch.setattr(Device, "_upload", careless)
    assert outcome(simulated, "seed") != expected


def test_uploads_wait_only_when_the_page_locked_area_is_full(
    simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specrt.engines.gpu.device.UPLOAD_BYTES", 4096)
    with simulated.on_cpu() as runtime:
        expected = generated(runtime, **WAYS["seed"])
    with simulated.open() as runtime:
        assert generated(runtime, **WAYS["seed"]) == expected


def test_graphs_are_captured_once_for_each_width_and_change_nothing(noisy_bundle: Path, tmp_path: Path) -> None:
    """On the second pass of a size; if it cannot be captured, there is one warning for each context."""
    found = {}
    for kind in ("graphs", "none", "refused"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
            simulated = SimulatedGpu(Path(shutil.copytree(noisy_bundle, tmp_path / kind)), "tensorrt", patch)
            patch.setattr(TrtBackend, "uses_graphs", kind != "none")
            simulated.cuda.can_capture = kind == "graphs"
            if kind == "refused":
                import specrt

                with (
                    pytest.warns(UserWarning, match="cannot be captured as a CUDA graph"),
                    specrt.load(simulated.bundle, backend="tensorrt") as runtime,
                ):
                    found[kind] = generated(runtime, **WAYS["block"])
            else:
                with simulated.open() as runtime:
                    found[kind] = generated(runtime, **WAYS["block"])
            counts = simulated.cuda.counts
            contexts = [context for engine in simulated.library.engines for context in engine.contexts]
            captured = sum(context.is_captured for context in contexts)
            rounds = sum(len(graph.work) > 1 for graph in simulated.cuda.graphs)
            assert (counts["launch"] > counts["capture"] > 0) == (kind == "graphs")
            assert captured == (counts["capture"] - rounds if kind == "graphs" else 0)
    assert found["graphs"] == found["none"] == found["refused"]


def test_rtx_exchanges_no_kernels_and_leaves_graphs_to_us(noisy_bundle: Path, tmp_path: Path) -> None:
    """Its own captures would collide with that of a round."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
        simulated = SimulatedGpu(Path(shutil.copytree(noisy_bundle, tmp_path / "bundle")), "tensorrt-rtx", patch)
        with simulated.open() as runtime:
            generated(runtime, **WAYS["greedy"])
        assert simulated.cuda.counts["capture"] > 0
        for engine in simulated.library.engines:
            for context in engine.contexts:
                width = next((s[1] for name, s in context.shapes.items() if name == "input_ids"), 1)
                is_kept = width <= KEPT_WIDTHS and context.profile == 0
                kernels = context.config.dynamic_shapes_kernel_specialization_strategy
                eager = DynamicShapesKernelSpecializationStrategy.EAGER
                assert (kernels is eager) == is_kept
                assert context.config.cuda_graph_strategy is CudaGraphStrategy.DISABLED
                assert context.runs < 2 or context.is_captured == is_kept
