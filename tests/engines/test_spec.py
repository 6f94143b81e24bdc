"""The contract and what is derived from it."""

from __future__ import annotations

import numpy as np
import pytest

from specrt.engines.seam import allocate
from specrt.engines.spec import (
    CAPACITY,
    INPUT_IDS,
    LOGITS,
    ROW_INDICES,
    ROWS,
    WIDTH,
    KVLayer,
    ModelSpec,
    TensorSpec,
    match_head_contract,
    model_contract,
    plan_buffers,
)

SPEC = ModelSpec(
    vocab_size=100,
    max_seq_len=50,
    capacity=54,
    max_width=16,
    max_rows=5,
    dtype="float16",
    kv_layers=(KVLayer(3, 64), KVLayer(1, 32)),
)


def test_resolve_gives_the_shape_for_the_dimensions() -> None:
    tensor = TensorSpec("past_key.0", "float16", (1, 3, CAPACITY, 64))
    assert tensor.resolve({CAPACITY: 54, WIDTH: 1}) == (1, 3, 54, 64)


def test_resolve_refuses_a_dimension_without_a_value() -> None:
    with pytest.raises(KeyError, match=WIDTH):
        TensorSpec(INPUT_IDS, "int64", (1, WIDTH)).resolve({ROWS: 1})


def test_a_model_takes_these_inputs_in_this_order() -> None:
    assert [tensor.name for tensor in model_contract(SPEC).inputs] == [
        "input_ids",
        "position_ids",
        "seqlens_k",
        "total_sequence_length",
        "row_indices",
        "past_key.0",
        "past_value.0",
        "past_key.1",
        "past_value.1",
    ]


def test_each_present_shares_the_memory_of_its_past() -> None:
    contract = model_contract(SPEC)
    inputs = {tensor.name: tensor for tensor in contract.inputs}
    logits, *presents = contract.outputs
    assert (logits.name, logits.dtype, logits.alias) == (LOGITS, "float32", None)
    assert [(p.name, p.alias) for p in presents] == [
        ("present_key.0", "past_key.0"),
        ("present_value.0", "past_value.0"),
        ("present_key.1", "past_key.1"),
        ("present_value.1", "past_value.1"),
    ]
    for present in presents:
        past = inputs[present.alias or ""]
        assert (present.dtype, present.shape) == (past.dtype, past.shape)


def test_the_buffers_of_a_model_at_their_largest_shape() -> None:
    plan = {
        buffer.name: (buffer.dtype, buffer.shape, buffer.num_bytes) for buffer in plan_buffers(model_contract(SPEC))
    }
    assert plan == {
        "input_ids": ("int64", (1, 16), 128),
        "position_ids": ("int64", (1, 16), 128),
        "seqlens_k": ("int32", (1,), 4),
        "total_sequence_length": ("int32", (1,), 4),
        "row_indices": ("int64", (5,), 40),
        "past_key.0": ("float16", (1, 3, 54, 64), 20_736),
        "past_value.0": ("float16", (1, 3, 54, 64), 20_736),
        "past_key.1": ("float16", (1, 1, 54, 32), 3_456),
        "past_value.1": ("float16", (1, 1, 54, 32), 3_456),
        "logits": ("float32", (5, 100), 2_000),
    }


def test_kv_bytes_are_those_of_the_planned_kv_buffers() -> None:
    kv = [buffer for buffer in plan_buffers(model_contract(SPEC)) if buffer.name.startswith("past_")]
    assert SPEC.kv_bytes == sum(buffer.num_bytes for buffer in kv) == 48_384


def test_the_planned_bytes_are_those_that_are_allocated() -> None:
    for buffer in plan_buffers(model_contract(SPEC)):
        array = allocate(buffer.shape, buffer.dtype)
        assert (array.nbytes, array.shape) == (buffer.num_bytes, buffer.shape)
        assert array.ctypes.data % 64 == 0
        assert not np.any(array)


def test_a_head_on_a_model_owns_only_its_outputs() -> None:
    shared = frozenset({LOGITS, INPUT_IDS, ROW_INDICES})
    plan = plan_buffers(match_head_contract(SPEC), shared)
    assert {buffer.name: buffer.owner for buffer in plan} == {
        "logits": "shared",
        "input_ids": "shared",
        "row_indices": "shared",
        "tokens": "self",
        "num_accepted": "self",
    }


def test_a_head_reads_its_inputs_just_as_the_model_has_them() -> None:
    model = model_contract(SPEC)
    of_model = {tensor.name: tensor for tensor in (*model.inputs, *model.outputs)}
    head = match_head_contract(SPEC)
    assert head.limits == model.limits
    for tensor in head.inputs:
        assert tensor == of_model[tensor.name]
