"""bitsandbytes weights: tables, scales of scales, and 8 bits, by the formula on codes that the tests know."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from specrt.engines.errors import SourceError, UnsupportedModelError
from specrt.engines.interface import Array
from specrt.exporter.sources.prequantized.bitsandbytes import bitsandbytes_format
from tests.exporter.sources.prequantized.test_gptq_awq import decoded

SHAPE, BLOCK, NESTED_BLOCK = (12, 40), 64, 4  # 480 values: the last block of 64 is not full
TABLE = np.sort(np.random.default_rng(0).uniform(-1, 1, 16)).astype(np.float32)


def four_bits(kind: str, nested: bool) -> tuple[dict[str, torch.Tensor], Array]:
    """(parts, weight [N, K] f64)"""
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 16, SHAPE[0] * SHAPE[1])
    num_blocks = -(-len(codes) // BLOCK)
    absmax = rng.uniform(0.5, 2, num_blocks).astype(np.float32)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": BLOCK, "dtype": "bfloat16", "shape": list(SHAPE)}
    parts = {
        "weight": torch.tensor([[int(a) * 16 + int(b)] for a, b in zip(codes[::2], codes[1::2], strict=True)]).byte(),
        "weight.quant_map": torch.from_numpy(TABLE),
        "weight.absmax": torch.from_numpy(absmax),
    }
    if nested:
        table = rng.uniform(-1, 1, 256).astype(np.float32)
        stored, outer = rng.integers(0, 256, num_blocks), rng.uniform(1, 2, -(-num_blocks // NESTED_BLOCK))
        outer = outer.astype(np.float32)
        absmax = np.array([table[b] * outer[j // NESTED_BLOCK] + 0.25 for j, b in enumerate(stored)])
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": 0.25}
        parts |= {"weight.absmax": torch.from_numpy(stored.astype(np.uint8))}
        parts |= {"weight.nested_absmax": torch.from_numpy(outer), "weight.nested_quant_map": torch.from_numpy(table)}
    text = json.dumps(state).encode()
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
    values = [float(TABLE[code]) * float(absmax[i // BLOCK]) for i, code in enumerate(codes)]
    return parts, np.array(values).reshape(SHAPE)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True], ids=["scales", "scales of scales"])
def test_4_bits(kind: str, nested: bool) -> None:
    parts, weight = four_bits(kind, nested)
    form = bitsandbytes_format({"load_in_4bit": True})
    assert np.abs(decoded(form, parts) - weight).max() <= 1e-6 * np.abs(weight).max()
    low_first = {**parts, "weight": (parts["weight"] << 4) | (parts["weight"] >> 4)}
    assert np.abs(decoded(form, low_first) - weight).max() > 0.1, "the high half of a byte is the first code"


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_4_bits_stored_as_floats(storage: torch.dtype) -> None:
    parts, weight = four_bits("nf4", False)
    stored = parts["weight"].flatten().view(storage)[:, None]
    found = decoded(bitsandbytes_format({"load_in_4bit": True}), {**parts, "weight": stored})
    assert np.abs(found - weight).max() <= 1e-6 * np.abs(weight).max()


def test_8_bits() -> None:
    rng = np.random.default_rng(2)
    stored, scales = rng.integers(-127, 128, (6, 10)), rng.uniform(0.5, 2, 6).astype(np.float32)
    parts = {"weight": torch.from_numpy(stored.astype(np.int8)), "SCB": torch.from_numpy(scales)}
    parts["weight_format"] = torch.tensor(0, dtype=torch.uint8)
    form = bitsandbytes_format({"load_in_8bit": True})
    assert np.allclose(decoded(form, parts), stored * scales[:, None] / 127, rtol=1e-6)
    with pytest.raises(SourceError, match="weight_format"):
        decoded(form, {**parts, "weight_format": torch.tensor(2, dtype=torch.uint8)})


@pytest.mark.parametrize("part", ["weight", "weight.absmax", "weight.quant_state.bitsandbytes__nf4"])
def test_damaged_parts_are_one_line(part: str) -> None:
    parts, _ = four_bits("nf4", False)
    with pytest.raises(SourceError, match="not a whole") as error:
        decoded(bitsandbytes_format({"load_in_4bit": True}), {**parts, part: parts[part][:-3]})
    assert "\n" not in str(error.value)


def test_settings_of_neither() -> None:
    with pytest.raises(UnsupportedModelError, match="load_in_4bit"):
        bitsandbytes_format({})
