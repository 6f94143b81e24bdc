"""The contract and what is derived from it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specrt.engines import samplers
from specrt.engines.contract import (
    CAPACITY,
    INPUT_IDS,
    LOGITS,
    ONNXRUNTIME_DIALECT,
    ROW_INDICES,
    ROWS,
    STANDARD_DIALECT,
    STANDARD_DIALECTS,
    WIDTH,
    Contract,
    KVLayer,
    ModelSpec,
    TensorSpec,
    model_contract,
    plan_buffers,
)
from specrt.engines.interface import allocate, check_shared
from specrt.engines.samplers import SAMPLER_NAMES, sampler_contract

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


def test_the_standard_dialect_takes_lengths_from_positions_and_a_fixed_capacity() -> None:
    contract = model_contract(replace(SPEC, dialect=STANDARD_DIALECT))
    names = [tensor.name for tensor in contract.inputs]
    assert names[:4] == ["input_ids", "position_ids", "row_indices", "past_key.0"]
    assert contract.inputs[3].shape == contract.outputs[1].shape == (1, 3, SPEC.capacity, 64)
    assert contract.outputs == tuple(
        replace(tensor, shape=tensor.resolve({CAPACITY: SPEC.capacity, ROWS: 0})) if tensor.alias else tensor
        for tensor in model_contract(SPEC).outputs
    )


@pytest.mark.parametrize("dialect", [ONNXRUNTIME_DIALECT, *STANDARD_DIALECTS])
def test_a_head_gathers_features_by_row(dialect: str) -> None:
    """From a cache with rows for a pass of the target, for each position, and for its own hidden state."""
    spec = replace(SPEC, dialect=dialect, feature_size=32, reads_features=True)
    inputs = {tensor.name: tensor for tensor in model_contract(spec).inputs}
    rows, cache = inputs["feature_rows"], inputs["feature_cache"]
    assert (rows.dtype, rows.shape, cache.dtype) == ("int64", (WIDTH,), "float16")
    assert cache.resolve(spec.limits) == (16 + 54 + 1, 32)
    assert isinstance(cache.shape[0], str) == (dialect == ONNXRUNTIME_DIALECT)


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


def test_the_match_sampler_on_a_model_owns_only_its_outputs() -> None:
    shared = frozenset({LOGITS, INPUT_IDS, ROW_INDICES})
    plan = plan_buffers(sampler_contract(samplers.MATCH, SPEC, SPEC.vocab_size), shared)
    assert {buffer.name: buffer.owner for buffer in plan} == {
        "logits": "shared",
        "input_ids": "shared",
        "row_indices": "shared",
        "tokens": "self",
        "num_accepted": "self",
    }


def tensors_of(contract: Contract) -> dict[str, TensorSpec]:
    return {tensor.name: tensor for tensor in (*contract.inputs, *contract.outputs)}


@pytest.mark.parametrize("name", SAMPLER_NAMES)
def test_a_sampler_reads_its_inputs_just_as_the_model_has_them(name: str) -> None:
    model = model_contract(SPEC)
    sampler = sampler_contract(name, SPEC, SPEC.vocab_size)
    assert sampler.limits == model.limits
    of_model = tensors_of(model)
    read = [tensor for tensor in sampler.inputs if tensor.name in of_model]
    assert read == [of_model[tensor.name] for tensor in read]
    assert not {tensor.name for tensor in sampler.outputs} & of_model.keys()


PLANS = {
    "match": {"logits": (5, 100), "input_ids": (1, 16), "row_indices": (5,), "tokens": (5,), "num_accepted": (1,)},
    "penalties": {
        "logits": (5, 100),
        "input_ids": (1, 16),
        "row_indices": (5,),
        "context_counts": (100,),
        "output_counts": (100,),
        "logit_bias": (100,),
        "ending_limit": (100,),
        "num_unending_rows": (1,),
        "repetition_penalty": (1,),
        "presence_penalty": (1,),
        "frequency_penalty": (1,),
        "processed_logits": (5, 100),
    },
    "softmax": {"logits": (5, 100), "temperature": (1,), "probs": (5, 90)},
    "filter": {
        "logits": (5, 100),
        "temperature": (1,),
        "top_k": (1,),
        "top_p": (1,),
        "min_p": (1,),
        "probs": (5, 90),
        "threshold": (5,),
        "nucleus_is_larger": (5,),
    },
    "nucleus": {
        "logits": (5, 100),
        "temperature": (1,),
        "top_p": (1,),
        "min_p": (1,),
        "threshold": (5,),
        "nucleus_is_larger": (5,),
        "probs": (5, 90),
    },
    "match-sampled": {
        "probs": (5, 90),
        "input_ids": (1, 16),
        "row_indices": (5,),
        "uniforms": (5, 3),
        "tokens": (5,),
        "num_accepted": (1,),
    },
    "block": {
        "probs": (5, 90),
        "draft_probs": (5, 90),
        "input_ids": (1, 16),
        "row_indices": (5,),
        "uniforms": (5, 3),
        "tokens": (5,),
        "num_accepted": (1,),
    },
    "logprobs": {
        "logits": (5, 100),
        "chosen_ids": (5,),
        "token_logprobs": (5,),
        "top_logprobs": (5, 20),
        "top_ids": (5, 20),
    },
}
PLANS["filter-wide"] = PLANS["filter"]
WHOLE = {"input_ids", "row_indices", "num_unending_rows", "top_k", "nucleus_is_larger"}
WHOLE |= {"tokens", "num_accepted", "chosen_ids", "top_ids"}


@pytest.mark.parametrize("name", SAMPLER_NAMES)
def test_the_buffers_of_a_sampler_on_a_model_of_100_ids_for_a_target_of_90(name: str) -> None:
    """Logits and counts are as wide as the model's vocabulary, probabilities as the target's."""
    plan = {buffer.name: (buffer.dtype, buffer.shape) for buffer in plan_buffers(sampler_contract(name, SPEC, 90))}
    assert plan == {tensor: ("int64" if tensor in WHOLE else "float32", PLANS[name][tensor]) for tensor in PLANS[name]}


def test_what_a_head_leaves_is_what_the_next_one_reads() -> None:
    """Each name is one buffer in every sampler; those that replace another have the same shape and dtype."""
    seen: dict[str, TensorSpec] = {}
    for name in SAMPLER_NAMES:
        for tensor in tensors_of(sampler_contract(name, SPEC, 90)).values():
            assert seen.setdefault(tensor.name, tensor) == tensor
    for name, stands_in in ((LOGITS, samplers.PROCESSED_LOGITS), (samplers.PROBS, samplers.DRAFT_PROBS)):
        assert (seen[name].dtype, seen[name].shape) == (seen[stands_in].dtype, seen[stands_in].shape)


def test_a_small_vocabulary_has_fewer_most_likely_ids() -> None:
    small = replace(SPEC, vocab_size=7)
    assert tensors_of(sampler_contract(samplers.LOGPROBS, small, 90))["top_ids"].shape == (ROWS, 7)


def test_an_unknown_sampler_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=f"^sampler: got 'guess', expected one of {', '.join(SAMPLER_NAMES)}$"):
        sampler_contract("guess", SPEC, 100)


def test_shared_memory_may_be_longer_and_nothing_else() -> None:
    """A sampler for one row is opened on the buffers of passes of several."""
    check_shared("logits", np.zeros((5, 100), np.float32), (5, 100), "float32")
    check_shared("logits", np.zeros((9, 100), np.float32), (5, 100), "float32")
    check_shared("logits", np.zeros((9, 100), np.float32)[2:7], (1, 100), "float32")
    for array in (
        np.zeros((4, 100), np.float32),
        np.zeros((5, 101), np.float32),
        np.zeros((5, 99), np.float32),
        np.zeros((1, 5, 100), np.float32),
        np.zeros(500, np.float32),
        np.zeros((5, 100), np.float16),
        np.zeros((10, 100), np.float32)[::2],
        np.zeros((100, 5), np.float32).T,
    ):
        with pytest.raises(ValueError, match=r"shared buffer logits: got .*, expected contiguous float32\[5, 100\]$"):
            check_shared("logits", array, (5, 100), "float32")
