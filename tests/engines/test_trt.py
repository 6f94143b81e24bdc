"""TensorRT's runtime on a simulated GPU: whole generations, their waits and their memory.

The same graphs run on ONNX Runtime's CPU provider on both sides, so that ids must be equal. What differs is all that is
new: memory that the host cannot see, a stream that runs only when somebody waits, contexts, graphs.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrt.engines.device import Device
from specrt.engines.heads import BLOCK, FILTER, MATCH, MATCH_SAMPLED, NUCLEUS, PENALTIES
from specrt.engines.plan import allocated_bytes, plan_slot
from specrt.engines.trt import KEPT_WIDTHS, TrtBinding, TrtBuild
from specrt.runtime.options import options_of
from specrt.runtime.runtime import Runtime
from specrt.runtime.settings import settings_of
from specrt.tools.rounds import run_rounds
from tests.engines.gpu_twin import Twin
from tests.engines.simulated_trt import (
    SCRATCH_BYTES,
    CudaGraphStrategy,
    DynamicShapesKernelSpecializationStrategy,
)

K, NUM_TOKENS = 3, 32
PROMPT = "The quick brown fox jumps over the lazy dog. The quick brown fox"
BACKENDS = ("tensorrt-rtx", "tensorrt")
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"draft": "none"},
    "greedy": {"draft": "model"},
    "ngram": {"draft": "ngram"},
    "reproducible": {"draft": "model", "reproducible": True},
    "seed": {"draft": "model", "temperature": 0.8, "seed": 3},
    "seed, filters": {"draft": "model", "temperature": 0.9, "seed": 4, "top_p": 0.9, "top_k": 40},
    "block": {"draft": "model", "temperature": 0.8, "seed": 3, "rule": "block", "top_p": 0.95},
    "token": {"draft": "model", "temperature": 0.8, "seed": 3, "rule": "token", "min_p": 0.01},
}
# What the host must see in between: more waits, the same ids.
SEEN: dict[str, dict[str, Any]] = {
    "penalties": {"draft": "model", "repetition_penalty": 1.3, "frequency_penalty": 0.3, "temperature": 0.8, "seed": 5},
    "bans": {"draft": "model", "banned_token_ids": [5, 6, 7], "min_new_tokens": 8},
    "logprobs": {"draft": "model", "logprobs": 2},
    "processors": {"draft": "model", "logits_processors": [lambda ids, logits: logits[::-1].copy()]},
    "both": {"draft": "model", "presence_penalty": 0.4, "logits_processors": [lambda ids, logits: logits * 0.5]},
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target in fp16, and as its draft the same with some noise: accepted whole, in part, and not at all."""
    import torch
    from transformers import AutoModelForCausalLM

    from specrt.exporter.export import export
    from specrt.exporter.options import ExportOptions
    from tests.tiny import save_tiny_model, tiny_tokenizer

    root = tmp_path_factory.mktemp("noisy")
    target = save_tiny_model(root / "target")
    model = AutoModelForCausalLM.from_pretrained(target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(0.02 * weights.std() * torch.randn(weights.shape, generator=generator))
    model.save_pretrained(root / "draft")
    tiny_tokenizer().save_pretrained(root / "draft")
    options = ExportOptions(
        str(target), root / "bundle", str(root / "draft"), K, max_seq_len=96, prefill_chunk=32, backend="tensorrt-rtx"
    )
    export(options)
    return root / "bundle"


@pytest.fixture(params=BACKENDS)
def twin(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Twin:
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
    return Twin(Path(shutil.copytree(exported, tmp_path / "bundle")), request.param, monkeypatch)


def generated(runtime: Runtime, prompt: Any = PROMPT, **way: Any) -> tuple[list[int], list[int], int]:
    """Ids, how many were accepted, and how much of the prompt was there already."""
    if way.get("draft") != "none":
        way.setdefault("num_speculative_tokens", K)
    result = runtime.generate(prompt, max_new_tokens=NUM_TOKENS, ignore_eos=True, **way)
    stats = result.stats
    return result.token_ids, stats.acceptance_histogram, stats.reused_prompt_tokens


def test_ids_are_those_of_the_same_graphs_on_the_cpu(twin: Twin) -> None:
    """Each way on a new slot and on one that was used before, whose prompt is there in part."""
    ways = {**WAYS, **SEEN}
    with twin.on_cpu() as runtime:
        expected = {name: generated(runtime, **way) for name, way in ways.items()}
    with twin.open() as runtime:
        found = {name: generated(runtime, **way) for name, way in ways.items()}
    assert found == expected
    accepted = [expected[name][1] for name in WAYS if name not in ("plain", "ngram")]
    assert any(histogram[K] for histogram in accepted if len(histogram) > K), "some drafts are accepted whole"
    assert any(sum(histogram[:K]) for histogram in accepted), "and some are not"


def counted(twin: Twin, runtime: Runtime, way: dict[str, Any]) -> list[Counter[str]]:
    """What the GPU was asked in each round."""
    options = options_of({"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "num_speculative_tokens": K, **way})  # type: ignore[typeddict-item]
    settings, slot = settings_of(options, runtime.manifest), runtime.open_slot("model")
    marks: list[Counter[str]] = []
    for _ in range(2):  # the second text finds all contexts there
        marks.clear()
        prompt = runtime.codec.encode(PROMPT)
        run_rounds(runtime, slot, prompt, settings, lambda *_: marks.append(twin.cuda.counts.copy()))
    slot.close()
    return [after - before for before, after in itertools.pairwise(marks[2:])]


@pytest.mark.parametrize("name", [name for name in WAYS if name != "plain"])
def test_the_host_waits_once_a_round_and_allocates_nothing(twin: Twin, name: str) -> None:
    with twin.open() as runtime:
        rounds = counted(twin, runtime, WAYS[name])
        vocab_bytes = 4 * runtime.manifest.target.spec.vocab_size
    assert len(rounds) >= 4
    for seen in rounds:
        assert (seen["wait"], seen["allocate"], seen["allocate_pinned"]) == (1, 0, 0), name
        assert seen["download bytes"] < min(vocab_bytes, 400), "ids and the verdict, no row of logits"
        assert seen["upload bytes"] < (K + 2) * 2048, "ids, positions, row indices and uniforms"


@pytest.mark.parametrize("name", ["penalties", "processors"])
def test_what_the_host_must_see_costs_waits(twin: Twin, name: str) -> None:
    """As the documents say: with penalties or processors each drafted id is read before the next pass."""
    with twin.open() as runtime:
        assert max(seen["wait"] for seen in counted(twin, runtime, SEEN[name])) > 1


def outcome(twin: Twin, way: str) -> Any:
    """What is generated on the GPU, or the kind of error that wrong bytes lead to."""
    try:
        with twin.open() as runtime:
            return generated(runtime, **WAYS[way])
    except Exception as error:
        return type(error)


def test_what_a_late_draft_took_is_told_by_the_device(twin: Twin) -> None:
    """The controller learns of both models, though the host never waits for the draft."""
    with twin.open() as runtime:
        result = runtime.generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True)
        assert result.stats.drafted > 0
        experience = runtime.experience
        assert experience.draft.is_known
        assert 0 < experience.draft.ms(1) < 1e3
        assert experience.target.ms(1) > 0
    with twin.on_cpu() as runtime:
        assert runtime.generate(PROMPT, max_new_tokens=NUM_TOKENS, ignore_eos=True).token_ids == result.token_ids


def test_a_read_that_does_not_wait_is_noticed(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the simulation: what is not waited for is not there."""
    with twin.on_cpu() as runtime:
        expected = generated(runtime, **WAYS["greedy"])
    monkeypatch.setattr(twin.device, "wait", lambda: None)
    assert outcome(twin, "greedy") != expected


def test_page_locked_memory_that_is_used_again_too_early_is_noticed(
    twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the uploads: all from one place, as if copies were done at once."""
    upload = Device._upload

    def careless(self: Device, address: int, data: Any) -> None:
        self._used_bytes = 0
        upload(self, address, data)

    with twin.on_cpu() as runtime:
        expected = generated(runtime, **WAYS["seed"])
    monkeypatch.setattr(Device, "_upload", careless)
    assert outcome(twin, "seed") != expected


def test_uploads_wait_only_when_the_page_locked_area_is_full(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrt.engines.device.UPLOAD_BYTES", 4096)
    with twin.on_cpu() as runtime:
        expected = generated(runtime, **WAYS["seed"])
    with twin.open() as runtime:
        assert generated(runtime, **WAYS["seed"]) == expected


def test_graphs_are_captured_once_for_each_width_and_change_nothing(exported: Path, tmp_path: Path) -> None:
    """TensorRT: on the second pass of a size; where nothing can be captured, a warning says so, once a context."""
    found = {}
    for kind in ("graphs", "none", "refused"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
            twin = Twin(Path(shutil.copytree(exported, tmp_path / kind)), "tensorrt", patch)
            patch.setattr(TrtBuild, "uses_graphs", kind != "none")
            twin.cuda.can_capture = kind == "graphs"
            if kind == "refused":
                import specrt

                with (
                    pytest.warns(UserWarning, match="cannot be captured as a CUDA graph"),
                    specrt.load(twin.bundle, backend="tensorrt") as runtime,
                ):
                    found[kind] = generated(runtime, **WAYS["block"])
            else:
                with twin.open() as runtime:
                    found[kind] = generated(runtime, **WAYS["block"])
            counts = twin.cuda.counts
            contexts = [context for engine in twin.library.engines for context in engine.contexts]
            captured = sum(context.is_captured for context in contexts)
            assert (counts["launch"] > counts["capture"] > 0) == (kind == "graphs")
            assert captured == (counts["capture"] if kind == "graphs" else 0)
    assert found["graphs"] == found["none"] == found["refused"]


def test_rtx_captures_by_itself_and_exchanges_no_kernels(exported: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
        twin = Twin(Path(shutil.copytree(exported, tmp_path / "bundle")), "tensorrt-rtx", patch)
        with twin.open() as runtime:
            generated(runtime, **WAYS["greedy"])
        assert twin.cuda.counts["capture"] == 0
        for engine in twin.library.engines:
            for context in engine.contexts:
                width = next((s[1] for name, s in context.shapes.items() if name == "input_ids"), 1)
                is_kept = width <= KEPT_WIDTHS and context.profile == 0
                kernels = context.config.dynamic_shapes_kernel_specialization_strategy
                eager = DynamicShapesKernelSpecializationStrategy.EAGER
                assert (kernels is eager) == is_kept
                assert (context.config.cuda_graph_strategy is CudaGraphStrategy.WHOLE_GRAPH_CAPTURE) == is_kept


def test_a_slot_takes_what_is_planned(twin: Twin) -> None:
    """Names, bytes, who lies where, and that nothing is allocated beside the plan."""
    heads = (MATCH, PENALTIES, FILTER, NUCLEUS, MATCH_SAMPLED, BLOCK)
    plan = plan_slot(twin.manifest, twin.backend, heads, scratch_bytes=SCRATCH_BYTES)
    found = {}
    with twin.open() as runtime:
        slot = runtime.open_slot("model")
        for role, part in (("target", slot.target), ("draft", slot.draft)):
            assert part is not None
            bindings = {role: part.model.binding, **{f"{role}/{name}": part.heads.head(name) for name in heads}}
            for owner, binding in bindings.items():
                assert isinstance(binding, TrtBinding)
                binding.run(1, 1)
                for tensor in (*binding.contract.inputs, *binding.contract.outputs):
                    found[f"{owner}/{tensor.name}"] = binding.address(tensor)
                if binding._mail.size:
                    found[f"{owner}/mailbox"] = binding._mail_address
        allocated = sum(twin.cuda.sizes.values()) + sum(twin.cuda.pinned.values())
        sizes = {**twin.cuda.sizes}
        slot.close()
    planned = {buffer.name: buffer for buffer in plan if buffer.owner != "device"}
    assert planned.keys() == found.keys()
    for name, buffer in planned.items():
        if buffer.alias is None:
            assert sizes[found[name]] == buffer.num_bytes, name
        elif buffer.alias.endswith("/mailbox"):
            assert 0 <= found[name] - found[buffer.alias] <= planned[buffer.alias].num_bytes - buffer.num_bytes
        else:
            assert found[name] == found[buffer.alias], name
    assert allocated == allocated_bytes(plan)


def test_closing_gives_back_all_memory(twin: Twin) -> None:
    with twin.open() as runtime:
        generated(runtime, **WAYS["block"])
        scratch = [address for address, _ in twin.device._scratch]
        assert len(scratch) == 1, "all contexts work in the same memory"
    assert sorted(twin.cuda.sizes) == scratch


def test_several_threads_get_what_one_gets(twin: Twin) -> None:
    names = ["greedy", "seed", "block", "plain"]
    with twin.on_cpu() as runtime:
        expected = {name: generated(runtime, **WAYS[name])[:2] for name in names}
    found = {}
    with twin.open() as runtime:

        def work(name: str) -> None:
            found[name] = generated(runtime, **WAYS[name])[:2]

        threads = [threading.Thread(target=work, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == expected


def test_a_prompt_that_goes_on_finds_the_ids_that_came_late(twin: Twin) -> None:
    """The host learned which ids the caches hold: the same part of both caches is used again as on the CPU."""
    found = []
    for opened in (twin.on_cpu, twin.open):
        with opened() as runtime:
            prompt = runtime.codec.encode(PROMPT)
            first = generated(runtime, prompt, **WAYS["greedy"])
            second = generated(runtime, [*prompt, *first[0]], **WAYS["greedy"])
            found.append((first, second))
    assert found[0] == found[1]
    assert found[0][1][2] >= len(prompt) + NUM_TOKENS - 2


def test_ids_that_were_never_learned_are_not_found_again(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error between draft and verdict: the slot holds passes over ids that the host has not seen."""
    from specrt.runtime.predictor import Target

    with twin.open() as runtime:
        prompt = runtime.codec.encode(PROMPT)
        expected = generated(runtime, prompt, **WAYS["greedy"])[0]
        verify, calls = Target.verify, []

        def fails(self: Target, *arguments: Any) -> tuple[int, int]:
            calls.append(1)
            if len(calls) == 3:
                raise OSError("gone")
            return verify(self, *arguments)

        monkeypatch.setattr(Target, "verify", fails)
        with pytest.raises(OSError, match="gone"):
            generated(runtime, prompt, **WAYS["greedy"])
        monkeypatch.undo()
        slot = runtime._pool._idle[0]
        assert slot.draft is not None
        assert -1 in slot.draft.model._tokens
        zeros = [*prompt, *([0] * 8)]
        assert slot.draft.model.reusable(zeros, 1) <= len(prompt) + 8
        assert generated(runtime, prompt, **WAYS["greedy"])[0] == expected


def test_a_verdict_needs_no_logits_on_the_host(twin: Twin) -> None:
    """``read`` gives the part of a tensor that the last pass used."""
    with twin.open() as runtime:
        slot = runtime.open_slot("none")
        slot.target.model.feed(list(range(4, 10)), 2)
        (logits,) = slot.target.model.read("logits")
        assert logits.shape == (2, runtime.manifest.target.spec.vocab_size)
        assert np.isfinite(logits).all()
        slot.close()
