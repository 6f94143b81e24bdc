"""compressed-tensors weights and 8-bit floats, by the formula on integers that the tests know."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specrt.engines.errors import SourceError, UnsupportedModelError
from specrt.exporter.quantization.rounding import round_blocks, share_on_grid
from specrt.exporter.sources.prequantized.compressed_tensors import compressed_tensors_format
from specrt.exporter.sources.prequantized.decoding import DecodedCheckpoint
from specrt.exporter.sources.prequantized.scaling import fp8_format
from tests.exporter.quantization.test_rounding import restored
from tests.exporter.sources.prequantized.packed import Stored, packed_parts, random_levels
from tests.exporter.sources.prequantized.test_gptq_awq import decoded

ROWS, COLUMNS = 32, 256


def settings(bits: int = 4, form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int", **weights}}
    return {"format": form, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


@pytest.mark.parametrize("size", [-1, 32, 128])
@pytest.mark.parametrize("symmetric", [False, True], ids=["asymmetric", "symmetric"])
@pytest.mark.parametrize("scattered", [False, True], ids=["in a row", "act-order"])
def test_packed_integers_of_4_bits(size: int, symmetric: bool, scattered: bool) -> None:
    levels = random_levels(np.random.default_rng(2), ROWS, COLUMNS, size, symmetric=symmetric, scattered=scattered)
    weight = decoded(compressed_tensors_format(settings()), packed_parts(levels, 4, symmetric, scattered))
    assert np.abs(weight - levels.weight()).max() <= 1e-6 * np.abs(levels.weight()).max()
    if not scattered:
        assert share_on_grid(weight, 32, through_zero=True) == 1
        rounded = restored(round_blocks(weight, 32, with_offsets=False, through_zero=True))
        assert np.abs(rounded - levels.weight()).max() <= 1e-6 * np.abs(levels.weight()).max()


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 8])
def test_packed_integers_of_other_bits(bits: int) -> None:
    """Words hold whole integers; rows of 30 columns and 27 rows do not fill the last one."""
    levels = random_levels(np.random.default_rng(2), 27, 30, 15, bits)
    weight = decoded(compressed_tensors_format(settings(bits)), packed_parts(levels, bits, False, False))
    assert np.abs(weight - levels.weight()).max() <= 1e-6 * np.abs(levels.weight()).max()


def test_a_zero_point_off_by_one_is_another_weight() -> None:
    levels = random_levels(np.random.default_rng(2), ROWS, COLUMNS, 128)
    parts = packed_parts(levels, 4, False, False)
    off = decoded(compressed_tensors_format(settings()), {**parts, "weight_zero_point": parts["weight_zero_point"] - 1})
    assert np.abs(off - levels.weight()).max() > 0.009


def test_each_module_has_the_bits_of_its_group() -> None:
    groups = {
        "four": {"targets": ["Linear"], "weights": {"num_bits": 4}},
        "eight": {"targets": [r"re:.*down_proj"], "weights": {"num_bits": 8}},
    }
    form = compressed_tensors_format({"format": "pack-quantized", "config_groups": groups})
    tensors: dict[str, torch.Tensor] = {}
    expected = {}
    for name, bits in (("a.up_proj", 4), ("a.down_proj", 8)):
        levels = random_levels(np.random.default_rng(bits), ROWS, COLUMNS, 128, bits, symmetric=True)
        tensors |= {f"{name}.{part}": tensor for part, tensor in packed_parts(levels, bits, True, False).items()}
        expected[f"{name}.weight"] = levels.weight()
    checkpoint = DecodedCheckpoint(Stored(tensors), form, lambda module: False)
    for name, weight in expected.items():
        assert np.abs(checkpoint.read(name).numpy() - weight).max() <= 1e-6 * np.abs(weight).max()
    of_one = DecodedCheckpoint(Stored(tensors), compressed_tensors_format(settings(4)), lambda module: False)
    with pytest.raises(SourceError, match="not a whole"):
        of_one.read("a.down_proj.weight")


@pytest.mark.parametrize("form", ["int-quantized", "naive-quantized"])
@pytest.mark.parametrize("shape", [(1,), (ROWS, 1), (ROWS, 4)], ids=["tensor", "channel", "group"])
def test_integers_of_8_bits(form: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    stored = rng.integers(-128, 128, (ROWS, COLUMNS)).astype(np.int8)
    scales = rng.uniform(0.01, 0.1, shape).astype(np.float32)
    parts = {"weight": torch.from_numpy(stored), "weight_scale": torch.from_numpy(scales)}
    spread = np.repeat(scales, COLUMNS // 4, axis=1) if shape[-1] == 4 else scales.reshape(-1, 1)
    given = {**parts, "input_scale": torch.ones(1)}
    assert np.allclose(decoded(compressed_tensors_format(settings(8, form)), given), stored * spread, rtol=1e-6)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8])
def test_8_bit_floats_with_a_scale_a_block(scale_dtype: torch.dtype) -> None:
    """30 rows and 20 columns in blocks of 13: the last ones are shorter, and both would divide into equal ones."""
    torch.manual_seed(0)
    stored = torch.randn(30, 20).to(torch.float8_e4m3fn)
    scales = 2.0 ** torch.randint(-8, 0, (3, 2))
    given = (scales.log2() + 127).to(torch.uint8) if scale_dtype == torch.uint8 else scales.to(scale_dtype)
    expected = [[float(stored[n, k]) * float(scales[n // 13, k // 13]) for k in range(20)] for n in range(30)]
    parts = {"weight": stored, "weight_scale_inv": given}
    assert np.array_equal(decoded(fp8_format({"weight_block_size": [13, 13]}), parts), np.array(expected, np.float32))
    assert not np.array_equal(decoded(fp8_format({}), parts), np.array(expected, np.float32)), "of equal blocks"
    with pytest.raises(SourceError, match="scales for"):
        decoded(fp8_format({"weight_block_size": [8, 8]}), parts)


def test_8_bit_floats_with_one_scale() -> None:
    stored = torch.randn(8, 6).to(torch.float8_e4m3fn)
    parts = {"weight": stored, "weight_scale": torch.tensor(0.5), "input_scale": torch.tensor(3.0)}
    assert np.array_equal(decoded(fp8_format({}), parts), stored.float().numpy() / 2)
    named = compressed_tensors_format(settings(8, "float-quantized", type="float"))
    assert np.array_equal(decoded(named, parts), stored.float().numpy() / 2)


def test_8_bits_without_scales_are_refused() -> None:
    stored = Stored({"m.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "n.weight_scale_inv": torch.ones(1)})
    stored.tensors["n.weight"] = stored.tensors["m.weight"]
    checkpoint = DecodedCheckpoint(stored, fp8_format({}), lambda module: False)
    with pytest.raises(SourceError, match="without its scales"):
        checkpoint.read("m.weight")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "nvfp4-pack-quantized"}, "nvfp4"),
        ({"format": "marlin-24"}, "marlin-24"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
    ],
)
def test_layouts_that_are_not_read_are_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedModelError, match=text):
        compressed_tensors_format({**settings(), **change})


@pytest.mark.parametrize("part", ["weight_packed", "weight_scale", "weight_zero_point"])
def test_parts_of_another_shape_are_one_line(part: str) -> None:
    parts = packed_parts(random_levels(np.random.default_rng(2), ROWS, COLUMNS, 128), 4, False, False)
    with pytest.raises(SourceError, match="not a whole"):
        decoded(compressed_tensors_format(settings()), {**parts, part: parts[part][1:]})
