"""A binding's passes: their rows, profiles and memory, and what is refused before the engine sees it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrt.engines.contract import LOGITS, model_contract, past_name
from specrt.engines.errors import BackendError
from specrt.engines.gpu.device import DeviceArray, encoded
from specrt.engines.interface import Array, write_pass
from specrt.engines.trt.engine import TrtBackend, TrtBinding, TrtEngine
from specrt.engines.trt.profiles import DECODE, PREFILL, VERIFY
from tests.engines.gpu.simulated_gpu import SimulatedGpu, write_engines
from tests.engines.trt import simulated_trt

BACKEND = "tensorrt-rtx"


@pytest.fixture
def simulated(tiny_tensorrt_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
    return SimulatedGpu(Path(shutil.copytree(tiny_tensorrt_bundle, tmp_path / "bundle")), BACKEND, monkeypatch)


def target_of(simulated: SimulatedGpu) -> TrtEngine:
    entry = simulated.manifest.target
    return TrtBackend(BACKEND, simulated.bundle).load(entry.graph, model_contract(entry.spec))


def test_what_shape_inference_raises_is_one_line(simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(self: Any) -> list[str]:
        raise RuntimeError("a shape of 0\nat node 7")

    binding = target_of(simulated).open()
    monkeypatch.setattr(simulated_trt.IExecutionContext, "infer_shapes", raises)
    with pytest.raises(BackendError, match=r"inferring shapes failed \(a shape of 0 at node 7\)"):
        binding.run(1, 1)


def test_passes_that_allocate_are_announced(simulated: SimulatedGpu) -> None:
    """Whether a round allocates depends on the engine, which is checked after its first run."""
    binding = target_of(simulated).open()
    simulated.library.is_capturable = False
    binding.run(1, 1)
    with pytest.warns(UserWarning, match="it allocates memory in its passes"):
        binding.run(1, 1)
    simulated.library.is_capturable = True
    for _ in range(3):
        binding.run(2, 1)


def test_passes_that_are_too_large_never_reach_the_engine(simulated: SimulatedGpu) -> None:
    spec = simulated.manifest.target.spec
    binding = target_of(simulated).open()
    for width, rows in ((spec.max_width + 1, 1), (1, spec.max_rows + 1), (0, 1), (1, 0)):
        with pytest.raises(ValueError, match=f"pass of {width} tokens and {rows} rows: at most"):
            binding.run(width, rows)
    assert [context.runs for engine in simulated.library.engines for context in engine.contexts] == []
    binding.close()
    binding.close()
    with pytest.raises(RuntimeError, match="closed"):
        binding.run(1, 1)


def test_shared_memory_is_checked(simulated: SimulatedGpu) -> None:
    engine = target_of(simulated)
    binding = engine.open()
    logits = binding.memory[LOGITS]
    assert isinstance(logits, DeviceArray)
    for wrong in (
        np.zeros(logits.shape, np.float32),
        replace(logits, dtype="float16"),
        replace(logits, shape=(logits.shape[0] - 1, logits.shape[1])),
    ):
        with pytest.raises(ValueError, match="shared buffer logits"):
            engine.open({LOGITS: wrong})
    assert engine.open({LOGITS: logits}).memory[LOGITS] is logits
    with pytest.raises(ValueError, match="is not part of it"):
        binding.take(LOGITS, 1, logits)


def logits_after(binding: TrtBinding, ids: Array, past: int, widths: list[int]) -> Array:
    """As ``tests.exporter.passes.passes_on_ort``, with uploads and reads."""
    rows, start = [], 0
    for width, kept in ([(past, 1)] if past else []) + [(width, width) for width in widths]:
        write_pass(binding.host, ids[start : start + width], start, kept)
        binding.upload()
        binding.run(width, kept)
        rows.append(binding.read(LOGITS)[0])
        start += width
    return np.concatenate(rows[bool(past) :])


@pytest.mark.parametrize("past", [0, 1, 5, 32])
def test_rows_equal_single_rows_equal_no_cache(simulated: SimulatedGpu, past: int) -> None:
    """The contract: a cache of any length, passes of 1, 2, 3 and W rows. All rows of a pass on an empty cache
    verify.
    """
    spec = simulated.manifest.target.spec
    ids = np.random.default_rng(past).integers(0, spec.vocab_size, past + spec.max_rows)
    engine = target_of(simulated)
    for n in (1, 2, 3, spec.max_rows):
        found = []
        for widths in ([n], [1] * n):
            binding = engine.open()
            found.append(logits_after(binding, ids, past, widths))
            binding.close()
        binding = engine.open()
        alone = logits_after(binding, ids[: past + n], 0, [1] * (past + n))[past:]
        binding.close()
        for logits in found:
            assert np.abs(logits - alone).max() / np.abs(alone).max() < 3e-2


def test_a_profile_for_one_token_is_used_where_it_was_built(simulated: SimulatedGpu) -> None:
    """The narrowest profile that fits; the answer is the same."""
    ids, spec = np.arange(4, 12), simulated.manifest.target.spec
    binding = target_of(simulated).open()
    expected = logits_after(binding, ids, 3, [1, 1, 2])
    binding.close()
    simulated.library.engines.clear()
    write_engines(simulated.bundle, BACKEND, simulated.library.__version__, has_decode_profile=True)
    engine = target_of(simulated)
    assert list(engine.entry.profiles) == [VERIFY, PREFILL, DECODE]
    assert [engine.profile_for(*size) for size in ((1, 1), (2, 1), (spec.max_width, 1))] == [2, 0, 1]
    binding = engine.open()
    assert np.array_equal(logits_after(binding, ids, 3, [1, 1, 2]), expected)
    assert sorted(c.profile for e in simulated.library.engines for c in e.contexts) == [0, 0, 2]


def test_bfloat16_goes_to_the_device_and_back(simulated: SimulatedGpu) -> None:
    """numpy has no such type: the host gives and gets float32."""
    binding = target_of(simulated).open()
    name = past_name("key", 0)
    memory = binding._tensors[name]
    binding._tensors[name] = replace(memory, dtype="bfloat16")
    spec = binding._spec(name)
    values = np.linspace(-3, 3, int(np.prod(memory.shape)), dtype=np.float32).reshape(memory.shape)
    binding.write(name, values)
    (found,) = binding.device.read([replace(memory, dtype="bfloat16")])
    assert found.dtype == np.float32
    assert found.shape == spec.resolve(binding.contract.limits)
    assert np.abs(found - values).max() <= 3 * 2**-7
    assert np.array_equal(encoded(found, "bfloat16"), encoded(values, "bfloat16"))
