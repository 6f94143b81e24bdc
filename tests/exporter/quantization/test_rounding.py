"""Weights in 4 bits: a grid that was there is found again, and other weights lose as little as can be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specrt.engines.interface import Array
from specrt.exporter.passes import optimize
from specrt.exporter.quantization import blocks
from specrt.exporter.quantization.blocks import QUANTIZATIONS, TABLE, quantize_weights
from specrt.exporter.quantization.rounding import Rounded, round_blocks, share_on_grid, symmetric_scales
from specrt.exporter.tracing.trace import trace
from tests.exporter.quantization.test_blocks import _logits, dequantized
from tests.exporter.tracing.architectures import VOCAB_SIZE, tiny_model
from tests.exporter.tracing.traces import tiny_spec

SIZE = 32


def restored(rounded: Rounded) -> Array:
    """The weight [N, B * size] that blocks stand for."""
    values = (rounded.levels.astype(np.float32) - rounded.zero_points[..., None]) * rounded.scales[..., None]
    if rounded.offsets is not None:
        values = values + rounded.offsets[..., None]
    result: Array = values.reshape(len(values), -1)
    return result


def on_a_grid(rng: np.random.Generator, rows: int, blocks: int, largest: int = 15) -> Array:
    """Weights [N, K] that a file with a scale and a real-valued lowest value a block gives: ``d * q - m``."""
    levels = rng.integers(0, largest + 1, (rows, blocks, SIZE))
    scales = rng.uniform(0.01, 0.1, (rows, blocks, 1)).astype(np.float32)
    lowest = scales * rng.uniform(0, 15, (rows, blocks, 1)).astype(np.float32)
    return (levels * scales - lowest).astype(np.float32).reshape(rows, -1)


def rounded_to_nearest(weight: Array) -> Array:
    """The usual way, as a yardstick: a block's range in 15 steps, a whole zero point. [N, K] in whole blocks."""
    blocks = weight.reshape(len(weight), -1, SIZE)
    lowest, highest = np.minimum(blocks.min(-1, keepdims=True), 0), np.maximum(blocks.max(-1, keepdims=True), 0)
    scales = (highest - lowest) / 15
    zeros = np.rint(-lowest / scales)
    result: Array = ((np.clip(np.rint(blocks / scales + zeros), 0, 15) - zeros) * scales).reshape(weight.shape)
    return result


@given(seed=st.integers(0, 10_000), largest=st.integers(1, 15))
def test_a_grid_is_found_again(seed: int, largest: int) -> None:
    weight = on_a_grid(np.random.default_rng(seed), 4, 5, largest)
    assert share_on_grid(weight, SIZE) == 1
    rounded = round_blocks(weight, SIZE, with_offsets=True)
    assert np.abs(restored(rounded) - weight).max() <= 1e-5 * np.abs(weight).max()
    assert rounded.offsets is not None
    within = np.abs(rounded.offsets) <= 0.5001 * rounded.scales  # a whole zero point took the rest
    assert within.all() or (rounded.zero_points[~within] % 15 == 0).all()


@given(seed=st.integers(0, 10_000))
def test_a_grid_with_a_whole_zero_point_needs_no_offsets(seed: int) -> None:
    """As GPTQ and AWQ store weights: four blocks share a scale and a zero point."""
    rng = np.random.default_rng(seed)
    levels, zeros = rng.integers(0, 16, (4, 8 * SIZE)), rng.integers(1, 16, (4, 2)).repeat(4 * SIZE, axis=1)
    scales = rng.uniform(0.01, 0.1, (4, 2)).astype(np.float16).astype(np.float32).repeat(4 * SIZE, axis=1)
    weight = (levels - zeros).astype(np.float32) * scales
    assert share_on_grid(weight, SIZE, through_zero=True) == 1
    rounded = round_blocks(weight, SIZE, with_offsets=False, through_zero=True)
    assert rounded.offsets is None
    assert np.abs(restored(rounded) - weight).max() <= 1e-6 * np.abs(weight).max()
    assert share_on_grid(on_a_grid(rng, 4, 50), SIZE, through_zero=True) < 0.3


def test_offsets_are_what_makes_it_exact() -> None:
    weight = on_a_grid(np.random.default_rng(0), 8, 8)
    without = restored(round_blocks(weight, SIZE, with_offsets=False))
    assert np.linalg.norm(without - weight) > 0.02 * np.linalg.norm(weight)


@given(seed=st.integers(0, 10_000))
def test_other_weights_lose_less_than_by_rounding_to_nearest(seed: int) -> None:
    weight = np.random.default_rng(seed).standard_normal((16, 4 * SIZE)).astype(np.float32)
    assert share_on_grid(weight, SIZE) == 0
    ours, nearest = (np.square(w - weight).sum() for w in (_searched(weight), rounded_to_nearest(weight)))
    assert ours <= nearest


def _searched(weight: Array) -> Array:
    return restored(round_blocks(weight, SIZE, with_offsets=False))


def test_blocks_on_no_grid_are_as_without_offsets_between_others() -> None:
    rng = np.random.default_rng(3)
    weight = np.concatenate([on_a_grid(rng, 4, 2), rng.standard_normal((4, 2 * SIZE)).astype(np.float32)], axis=1)
    rounded = round_blocks(weight, SIZE, with_offsets=True)
    alone = round_blocks(weight[:, 2 * SIZE :], SIZE, with_offsets=False)
    assert np.array_equal(rounded.levels[:, 2:], alone.levels) and np.array_equal(rounded.scales[:, 2:], alone.scales)
    assert rounded.offsets is not None and not rounded.offsets[:, 2:].any()


@pytest.mark.parametrize("value", [0.0, 0.25, -3.0])
@pytest.mark.parametrize("with_offsets", [False, True])
def test_a_block_of_one_value(value: float, with_offsets: bool) -> None:
    weight = np.full((2, SIZE), value, np.float32)
    assert np.allclose(restored(round_blocks(weight, SIZE, with_offsets)), weight, rtol=1e-6)


def test_a_last_block_that_is_not_full() -> None:
    weight = np.random.default_rng(1).standard_normal((3, 40)).astype(np.float32)
    assert share_on_grid(weight, SIZE) == 0
    rounded = round_blocks(weight, SIZE, with_offsets=False)
    assert rounded.levels.shape == (3, 2, SIZE)
    assert np.abs(restored(rounded)[:, :40] - weight).max() < 0.6


@given(seed=st.integers(0, 10_000))
def test_symmetric_scales_lose_less_than_the_largest_weight_s(seed: int) -> None:
    blocks = np.random.default_rng(seed).standard_normal((64, SIZE)).astype(np.float32)

    def error(scales: Array) -> float:
        levels = np.clip(np.rint(blocks / scales[:, None]), -8, 7)
        return float(np.square(levels * scales[:, None] - blocks).sum())

    assert error(symmetric_scales(blocks, 7)) <= error(np.abs(blocks).max(-1) / 7)


@pytest.mark.parametrize("architecture", ["llama", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_a_graph_with_offsets_answers_as_the_weights_it_was_made_of(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The columns of offsets are rounded too, so close, not equal: three times closer at least than without them."""
    monkeypatch.setitem(blocks.ACCURACY_LEVEL, ir.DataType.FLOAT, 0)
    model = tiny_model(architecture, intermediate_size=64)
    rng = np.random.default_rng(5)
    with torch.no_grad():
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if weight is None or weight.dim() != 2:
                continue
            rows, columns = weight.shape
            if rows == VOCAB_SIZE:
                rounded = dequantized(weight.numpy().T.copy(), TABLE).T
            else:
                assert columns % SIZE == 0
                rounded = on_a_grid(rng, rows, columns // SIZE) * 0.2
            weight.data = torch.from_numpy(rounded.copy())
    spec = tiny_spec(model)
    ids = rng.integers(3, VOCAB_SIZE, 9)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()
    plain = optimize(trace(model, spec), spec)
    graph = quantize_weights(plain.clone(), "int4", VOCAB_SIZE)
    assert sum(node.op_type == "ReduceSum" for node in graph.graph) == 4 * len(spec.kv_layers)
    with_offsets = np.abs(_logits(graph, spec, ids, tmp_path) - expected).max()
    monkeypatch.setattr(blocks, "WORTH_OFFSETS", 2)
    without = np.abs(_logits(quantize_weights(plain, "int4", VOCAB_SIZE), spec, ids, tmp_path) - expected).max()
    assert with_offsets < without / 3
    assert QUANTIZATIONS["int4"].block_size == SIZE
