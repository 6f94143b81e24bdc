"""The plan of a slot's memory is what ONNX Runtime is really given: names, bytes, and which tensors share memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import specrt
from specrt.engines.buffers import PlannedBuffer, allocated_bytes, plan_slot
from specrt.engines.contract import STANDARD_DIALECT, model_contract
from specrt.engines.errors import BackendError
from specrt.engines.manifest import manifest_from_bundle
from specrt.engines.ort.cpu import OrtEngine
from specrt.engines.samplers import BLOCK, FILTER, MATCH, PENALTIES
from specrt.runtime.slots import SlotModel

SAMPLERS = (MATCH, PENALTIES, FILTER, BLOCK)
Bound = dict[str, tuple[int, int]]  # (bytes, address) of each tensor


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Bound:
    """What ONNX Runtime is given to bind, by tensor name, the last time it is."""
    noted: Bound = {}
    for method in ("bind_input", "bind_output"):
        bind = getattr(ort.IOBinding, method)

        def note(io: Any, name: str, device: str, number: int, dtype: Any, shape: Any, address: int, bind=bind) -> None:
            noted[name] = (int(np.prod(shape)) * np.dtype(dtype).itemsize, address)
            bind(io, name, device, number, dtype, shape, address)

        monkeypatch.setattr(ort.IOBinding, method, note)
    return noted


def _given(owner: str, bound: Bound, engine_run: Any) -> Bound:
    bound.clear()
    engine_run()
    return {f"{owner}/{name}": value for name, value in bound.items()}


def _of_slot(role: str, slot: SlotModel, rows: int, bound: Bound) -> Bound:
    """Everything bound when the model and ``SAMPLERS`` run at their widest."""
    spec = slot.model.spec
    found = _given(role, bound, lambda: slot.model.feed([3] * spec.max_width, spec.max_rows))
    for sampler in SAMPLERS:
        binding = slot.samplers.sampler(sampler)
        found |= _given(f"{role}/{sampler}", bound, lambda binding=binding: binding.run(spec.max_width, rows))
    return found


def _assert_equal(plan: tuple[PlannedBuffer, ...], found: Bound) -> None:
    assert {buffer.name: buffer.num_bytes for buffer in plan} == {name: size for name, (size, _) in found.items()}
    addresses = [found[buffer.name][1] for buffer in plan if buffer.alias is None]
    assert len(set(addresses)) == len(addresses), "buffers that are planned apart are apart"
    for buffer in plan:
        assert buffer.name.startswith(buffer.owner)
        if buffer.alias is not None:
            assert found[buffer.name][1] == found[buffer.alias][1], f"{buffer.name} is in {buffer.alias}"


def test_a_slot_binds_what_is_planned(tiny_bundle: Path, bound: Bound) -> None:
    """Target, its own weights as the draft, and samplers that read what earlier samplers wrote."""
    plan = plan_slot(manifest_from_bundle(tiny_bundle), "onnxruntime", SAMPLERS)
    with specrt.load(tiny_bundle, threads=1) as runtime:
        slot = runtime.open_slot("self")
        assert slot.draft is not None
        found = _of_slot("target", slot.target, slot.target.model.spec.max_rows, bound)
        found |= _of_slot("draft", slot.draft, 1, bound)
        _assert_equal(plan, found)
        slot.close()
    kv_bytes = sum(buffer.num_bytes for buffer in plan if "/past_" in buffer.name)
    assert kv_bytes == 2 * manifest_from_bundle(tiny_bundle).target.spec.kv_bytes
    assert allocated_bytes(plan) < sum(buffer.num_bytes for buffer in plan) - kv_bytes


def test_the_standard_dialect_binds_what_is_planned(tiny_tensorrt_bundle: Path, bound: Bound) -> None:
    """One plan for both TensorRT backends; ONNX Runtime has the same contract, without what a device adds."""
    manifest = manifest_from_bundle(tiny_tensorrt_bundle)
    assert manifest.draft.model is not None
    assert manifest.target.spec.dialect == STANDARD_DIALECT
    on_device = plan_slot(manifest, "tensorrt-rtx", ())
    assert on_device == plan_slot(manifest, "tensorrt", ())
    plan = tuple(
        replace(buffer, alias=None if (buffer.alias or "").endswith("/mailbox") else buffer.alias)
        for buffer in on_device
        if buffer.owner != "device" and not buffer.name.endswith("/mailbox")
    )
    found: Bound = {}
    for role, entry in (("target", manifest.target), ("draft", manifest.draft.model)):
        spec = entry.spec
        binding = OrtEngine(tiny_tensorrt_bundle / entry.graph, model_contract(spec), threads=1).open()
        found |= _given(role, bound, lambda binding=binding, spec=spec: binding.run(spec.max_width, spec.max_rows))
    _assert_equal(plan, found)


def test_no_plan_for_a_backend_that_the_bundle_is_not_for(tiny_bundle: Path) -> None:
    with pytest.raises(BackendError, match="exported for onnxruntime"):
        plan_slot(manifest_from_bundle(tiny_bundle), "tensorrt")
