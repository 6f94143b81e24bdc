"""Engines that do not fit, are damaged, or are too small: one line each, before the library reads them."""

from __future__ import annotations

import gc
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specrt
from specrt.engines.contract import LOGITS, ROWS, WIDTH, model_contract, past_name
from specrt.engines.errors import BackendError, BundleError, SpecrtError, UsageError
from specrt.engines.gpu.device import DeviceArray, encoded
from specrt.engines.interface import Array, write_pass
from specrt.engines.storage.integrity import sha256_of
from specrt.engines.trt import engine
from specrt.engines.trt.engine import TrtBackend, TrtBinding, TrtEngine
from specrt.engines.trt.profiles import DECODE, PREFILL, VERIFY, Profile
from specrt.engines.trt.record import (
    RECORD_NAME,
    BuildRecord,
    check_build,
    engines_folder,
    record_from_bundle,
    record_text,
    remember_build,
)
from specrt.engines.trt.runtime_cache import RUNTIME_CACHE_NAME
from tests.engines.gpu.simulated_gpu import SimulatedGpu, write_engines
from tests.engines.trt.simulated_trt import DataType

BACKEND = "tensorrt-rtx"


@pytest.fixture
def simulated(tiny_tensorrt_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
    return SimulatedGpu(Path(shutil.copytree(tiny_tensorrt_bundle, tmp_path / "bundle")), BACKEND, monkeypatch)


def target_of(simulated: SimulatedGpu) -> TrtEngine:
    entry = simulated.manifest.target
    return TrtBackend(BACKEND, simulated.bundle).load(entry.graph, model_contract(entry.spec))


def rewrite(simulated: SimulatedGpu, **changes: Any) -> None:
    """Change the record of the build."""
    record: BuildRecord = replace(record_from_bundle(simulated.bundle, BACKEND), **changes)
    (engines_folder(simulated.bundle, BACKEND) / RECORD_NAME).write_text(record_text(record))
    remember_build(record)


def refused(simulated: SimulatedGpu, kind: type[SpecrtError]) -> str:
    with pytest.raises(kind) as caught:
        specrt.load(simulated.bundle, backend=BACKEND).open_slot("none")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_record_is_checked_before_anything_is_loaded(simulated: SimulatedGpu) -> None:
    simulated.cuda.compute_capability = "7.5"
    assert "engines are for compute capability 8.9, this GPU has 7.5; build them again with" in refused(
        simulated, BackendError
    )
    simulated.cuda.compute_capability = "8.9"
    simulated.library.__version__ = "1.7.9"
    assert "engines are for tensorrt_rtx 1.7.1, found 1.7.9" in refused(simulated, BackendError)
    simulated.library.__version__ = "1.7.1"
    engines = record_from_bundle(simulated.bundle, BACKEND).engines
    for profile, dim, least in ((VERIFY, ROWS, 3), (PREFILL, WIDTH, 31)):
        profiles: dict[str, Profile] = {
            **engines["target"].profiles,
            profile: {WIDTH: (1, 1, least), ROWS: (1, 1, least)},
        }
        rewrite(simulated, engines={**engines, "target": replace(engines["target"], profiles=profiles)})
        assert f"profile {profile} is built for {least} {dim}" in refused(simulated, BackendError)
    assert simulated.library.engines == []


def test_an_engine_that_the_library_does_not_take_is_never_used(simulated: SimulatedGpu) -> None:
    path = engines_folder(simulated.bundle, BACKEND) / "target.engine"
    path.write_bytes(b"no engine at all")
    assert "bytes, expected" in refused(simulated, BundleError)
    engines = record_from_bundle(simulated.bundle, BACKEND).engines
    entry = replace(engines["target"], num_bytes=path.stat().st_size, sha256=sha256_of(path))
    rewrite(simulated, engines={**engines, "target": entry})
    assert "makes no engine of its 16 bytes (the engine is corrupt), expected" in refused(simulated, BackendError)


def test_a_bundle_without_engines_names_the_command_that_builds_them(simulated: SimulatedGpu) -> None:
    shutil.rmtree(engines_folder(simulated.bundle, BACKEND))
    assert f"specrt build {simulated.bundle} --backend {BACKEND}" in refused(simulated, BackendError)


def test_engines_of_another_machine_are_announced(
    simulated: SimulatedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path / "another"))
    with pytest.warns(UserWarning, match="native code that this machine did not build"):
        specrt.load(simulated.bundle, backend=BACKEND).close()


def test_an_engine_is_compared_with_the_contract(simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engines.trt import simulated_trt

    monkeypatch.setattr(simulated_trt.ICudaEngine, "get_tensor_dtype", lambda self, name: DataType.FLOAT)
    assert "differs from the contract at input_ids: got (True, 'float32', (1, -1), True, None), expected" in refused(
        simulated, BundleError
    )


def test_outputs_must_be_in_the_memory_of_their_inputs(
    simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that copies its cache would be bound to one address, and give wrong results."""
    from tests.engines.trt import simulated_trt

    monkeypatch.setattr(simulated_trt.ICudaEngine, "get_aliased_input_tensor", lambda self, name: None)
    said = refused(simulated, BundleError)
    assert "differs from the contract at present" in said and "(input, dtype, shape, on the GPU, alias)" in said


def test_a_gpu_that_rtx_has_no_code_for_is_named_before_the_record(simulated: SimulatedGpu) -> None:
    simulated.cuda.compute_capability = "9.0"
    said = refused(simulated, BackendError)
    assert "has compute capability 7.5, 8.0, 8.6, 8.9, 12.0, 12.1 and this GPU has 9.0" in said
    assert said.endswith("TensorRT-RTX is neither for Jetson nor for Hopper, use --backend tensorrt there")


def test_what_shape_inference_raises_is_one_line(simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engines.trt import simulated_trt

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


def test_there_is_no_tensorrt_on_the_cpu(simulated: SimulatedGpu) -> None:
    with pytest.raises(BackendError, match="device cpu: backend tensorrt-rtx runs on a GPU only"):
        specrt.load(simulated.bundle, device="cpu")
    with pytest.raises(BackendError, match="device cpu: backend tensorrt-rtx runs on a GPU only"):
        specrt.load(simulated.bundle, draft_device="cpu")
    with pytest.raises(UsageError, match="device: got 'tpu', expected one of cpu, cuda"):
        specrt.load(simulated.bundle, device="tpu")


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


def test_runtime_cache_is_kept_next_to_the_engines(simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    path = engines_folder(simulated.bundle, BACKEND) / RUNTIME_CACHE_NAME

    def generate() -> None:
        with specrt.load(simulated.bundle, backend=BACKEND) as runtime:
            runtime.generate("The quick", max_new_tokens=3)
        del runtime
        gc.collect()  # as a new process: no engine of the build is in use

    generate()
    entries = json.loads(path.read_bytes())
    assert any("target/model.onnx" in entry for entry in entries)
    before = path.stat().st_mtime_ns
    generate()
    assert path.stat().st_mtime_ns == before, "nothing new, nothing written"
    path.write_bytes(b"of another library")
    generate()
    assert json.loads(path.read_bytes()) == entries

    def fails(*_: Any) -> None:
        raise OSError("read-only")

    path.unlink()
    monkeypatch.setattr("specrt.engines.trt.runtime_cache.os.replace", fails)
    with pytest.warns(UserWarning, match=r"runtime.cache: cannot be written \(read-only\)"):
        generate()
    assert [file.name for file in path.parent.iterdir() if file.name.startswith(".")] == []


def test_a_build_is_checked_once_for_all_its_engines(simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = []

    def counted(*arguments: Any) -> list[str]:
        checks.append(1)
        return check_build(*arguments)

    monkeypatch.setattr(engine, "check_build", counted)
    with specrt.load(simulated.bundle, backend=BACKEND) as runtime:
        runtime.generate("The quick", max_new_tokens=3)
    assert len(simulated.library.engines) > 2
    assert len(checks) == 1


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
