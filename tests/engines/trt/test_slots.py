"""A slot on the simulated GPU: the memory that it takes and gives back, and what its caches are known to hold."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrt.engines.buffers import allocated_bytes, plan_slot
from specrt.engines.manifest import manifest_from_bundle
from specrt.engines.samplers import BLOCK, FILTER, MATCH, MATCH_SAMPLED, NUCLEUS, PENALTIES
from specrt.engines.trt.engine import TrtBinding
from specrt.runtime.target import Target
from tests.engines.gpu.simulated_gpu import SimulatedGpu
from tests.engines.numpy_samplers.noisy_pair import NUM_TOKENS, PROMPT, WAYS, K, generated
from tests.engines.trt.simulated_trt import SCRATCH_BYTES
from tests.exports import Exports


def test_a_slot_takes_what_is_planned(simulated: SimulatedGpu) -> None:
    """Names, bytes, who is where, and that nothing is allocated next to the plan."""
    samplers = (MATCH, PENALTIES, FILTER, NUCLEUS, MATCH_SAMPLED, BLOCK)
    plan = plan_slot(simulated.manifest, simulated.backend, samplers, scratch_bytes=SCRATCH_BYTES)
    found = {}
    with simulated.open() as runtime:
        slot = runtime.open_slot("model")
        for role, part in (("target", slot.target), ("draft", slot.draft)):
            assert part is not None
            bindings = {
                role: part.model.binding,
                **{f"{role}/{name}": part.samplers.sampler(name) for name in samplers},
            }
            for owner, binding in bindings.items():
                assert isinstance(binding, TrtBinding)
                binding.run(1, 1)
                for tensor in (*binding.contract.inputs, *binding.contract.outputs):
                    found[f"{owner}/{tensor.name}"] = binding.address(tensor)
                if owner == role:
                    binding._rounds.reserve()
                if binding._mail.size:
                    found[f"{owner}/mailbox"] = binding._mail_address
        allocated = sum(simulated.cuda.sizes.values()) + sum(simulated.cuda.pinned.values())
        sizes = {**simulated.cuda.sizes}
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


def test_closing_gives_back_all_memory(simulated: SimulatedGpu) -> None:
    with simulated.open() as runtime:
        generated(runtime, **WAYS["block"])
        scratch = [address for address, _ in simulated.device._scratch]
        assert len(scratch) == 1, "all contexts work in the same memory"
    assert sorted(simulated.cuda.sizes) == scratch
    assert len(simulated.cuda.pinned) == 2, "what the device uploads from and reads into"


def test_a_draft_may_read_the_targets_cache(exports: Exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target with its weights in 8 bits, opened on the target's KV: both write it, in the order of the stream."""
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
    exported = exports.bundle(exports.model(), "self:int8", K, max_seq_len=96, prefill_chunk=32, backend="tensorrt-rtx")
    assert manifest_from_bundle(exported).draft.shares_kv
    bundle = Path(shutil.copytree(exported, tmp_path / "bundle"))
    simulated, names = SimulatedGpu(bundle, "tensorrt-rtx", monkeypatch), ["greedy", "seed", "block", "plain"]
    with simulated.on_cpu() as runtime:
        expected = {name: generated(runtime, **WAYS[name]) for name in names}
    with simulated.open() as runtime:
        assert {name: generated(runtime, **WAYS[name]) for name in names} == expected
        slot = runtime._pool._idle[0]
        assert slot.draft is not None
        shared = slot.draft.model.binding.memory
        assert all(memory is shared[name] for name, memory in slot.target.model.kv_memory().items())
    assert sum(expected["greedy"][1][1:]) > 0, "some drafts are accepted"


def test_several_threads_get_what_one_gets(simulated: SimulatedGpu) -> None:
    names = ["greedy", "seed", "block", "plain"]
    with simulated.on_cpu() as runtime:
        expected = {name: generated(runtime, **WAYS[name])[:2] for name in names}
    found = {}
    with simulated.open() as runtime:

        def work(name: str) -> None:
            found[name] = generated(runtime, **WAYS[name])[:2]

        threads = [threading.Thread(target=work, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == expected


def test_a_prompt_that_goes_on_finds_the_ids_that_came_late(simulated: SimulatedGpu) -> None:
    """The host learned which ids the caches hold: the same part of both caches is used again as on the CPU."""
    found = []
    for opened in (simulated.on_cpu, simulated.open):
        with opened() as runtime:
            prompt = runtime.codec.encode(PROMPT)
            first = generated(runtime, prompt, **WAYS["greedy"])
            for part in (runtime._pool._idle[0].target, runtime._pool._idle[0].draft):
                assert part is not None
                assert part.model._tokens[: part.model.kv_len] == [*prompt, *first[0]][: part.model.kv_len]
            second = generated(runtime, [*prompt, *first[0]], **WAYS["greedy"])
            found.append((first, second))
    assert found[0] == found[1]
    assert found[0][1][2] >= len(prompt) + NUM_TOKENS - 2


def test_ids_that_were_never_learned_are_not_found_again(
    simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error between draft and verdict: the slot holds passes over ids that the host has not seen."""
    with simulated.open() as runtime:
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


def test_a_verdict_needs_no_logits_on_the_host(simulated: SimulatedGpu) -> None:
    """``read`` gives the part of a tensor that the last pass used."""
    with simulated.open() as runtime:
        slot = runtime.open_slot("none")
        slot.target.model.feed(list(range(4, 10)), 2)
        (logits,) = slot.target.model.read("logits")
        assert logits.shape == (2, runtime.manifest.target.spec.vocab_size)
        assert np.isfinite(logits).all()
        slot.close()
