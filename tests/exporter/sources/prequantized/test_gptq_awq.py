"""GPTQ and AWQ weights, by the formula of their papers on integers that the tests know."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specrt.engines.errors import SourceError, UnsupportedModelError
from specrt.engines.interface import Array
from specrt.exporter.quantization.rounding import round_blocks, share_on_grid
from specrt.exporter.sources.prequantized import awq
from specrt.exporter.sources.prequantized.awq import awq_format
from specrt.exporter.sources.prequantized.decoding import DecodedCheckpoint, Format
from specrt.exporter.sources.prequantized.gptq import gptq_format
from tests.exporter.quantization.test_rounding import restored
from tests.exporter.sources.prequantized.packed import Stored, awq_parts, gptq_parts, random_levels

ROWS, COLUMNS = 32, 256
GPTQ = {"bits": 4, "group_size": 128, "desc_act": False}
AWQ = {"bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}


def decoded(form: Format, parts: dict[str, torch.Tensor], transposed: bool = False) -> Array:
    stored = Stored({**{f"m.{part}": tensor for part, tensor in parts.items()}, "norm.weight": torch.ones(3)})
    checkpoint = DecodedCheckpoint(stored, form, lambda module: transposed)
    assert checkpoint.names() == ("m.weight", "norm.weight")
    result: Array = checkpoint.read("m.weight").numpy()
    return result


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("order", ["none", "in a row", "scattered"])
def test_gptq(bits: int, version: str, order: str) -> None:
    levels = random_levels(np.random.default_rng(bits), ROWS, COLUMNS, 32, bits, scattered=order == "scattered")
    parts = gptq_parts(levels, bits, less_one=int(version == "gptq"), with_order=order != "none")
    weight = decoded(gptq_format({"bits": bits, "checkpoint_format": version}), parts)
    assert weight.dtype == np.float32
    assert np.abs(weight - levels.weight()).max() <= 1e-6 * np.abs(levels.weight()).max()
    other = decoded(gptq_format({"bits": bits, "checkpoint_format": {"gptq": "gptq_v2"}.get(version, "gptq")}), parts)
    assert np.abs(other - levels.weight()).max() > 0.009, "a zero point off by one is another weight"


@pytest.mark.parametrize("size", [-1, 32, 64, 128])
@pytest.mark.parametrize("symmetric", [False, True], ids=["asymmetric", "symmetric"])
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_int4_keeps_the_file_s_own_grid(method: str, symmetric: bool, size: int) -> None:
    levels = random_levels(np.random.default_rng(1), ROWS, COLUMNS, size, symmetric=symmetric)
    if method == "gptq":
        weight = decoded(gptq_format(GPTQ), gptq_parts(levels, 4))
    else:
        weight = decoded(awq_format(AWQ), awq_parts(levels))
    assert np.abs(weight - levels.weight()).max() <= 1e-6 * np.abs(levels.weight()).max()
    assert share_on_grid(weight, 32, through_zero=True) == 1
    rounded = restored(round_blocks(weight, 32, with_offsets=False, through_zero=True))
    assert np.abs(rounded - levels.weight()).max() <= 1e-6 * np.abs(levels.weight()).max()


def test_scattered_groups_have_no_grid_to_keep() -> None:
    levels = random_levels(np.random.default_rng(1), ROWS, COLUMNS, 32, scattered=True)
    assert share_on_grid(decoded(gptq_format(GPTQ), gptq_parts(levels, 4)), 32) == 0


def test_awq_without_its_order_undone_is_another_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = random_levels(np.random.default_rng(1), ROWS, COLUMNS, 128)
    monkeypatch.setattr(awq, "ORDER", tuple(range(8)))
    assert np.abs(decoded(awq_format(AWQ), awq_parts(levels)) - levels.weight()).max() > 0.1


def test_a_module_that_keeps_its_weight_transposed() -> None:
    levels = random_levels(np.random.default_rng(1), ROWS, COLUMNS, 128)
    parts = gptq_parts(levels, 4)
    assert np.array_equal(decoded(gptq_format(GPTQ), parts, transposed=True), decoded(gptq_format(GPTQ), parts).T)


@pytest.mark.parametrize(
    ("make", "settings", "text"),
    [
        (gptq_format, {"checkpoint_format": "marlin"}, "marlin"),
        (gptq_format, {"checkpoint_format": "gptq_p"}, "gptq_p"),
        (gptq_format, {"is_marlin_format": True}, "gptq"),
        (gptq_format, {"adapter": {"rank": 8}}, "adapter"),
        (awq_format, {"version": "GEMV"}, "GEMV"),
        (awq_format, {"version": "exllama"}, "exllama"),
        (awq_format, {"bits": 8}, "8 bits"),
        (awq_format, {"backend": "llm-awq"}, "gemm"),
    ],
)
def test_layouts_that_are_not_read_are_named(make: Any, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedModelError, match=text):
        make(settings)


def _without(part: str) -> Any:
    return lambda parts: {name: tensor for name, tensor in parts.items() if name != part}


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_without("scales"), "m.scales is missing"),
        (_without("qzeros"), "m.qzeros is missing"),
        (lambda p: {**p, "scales": p["scales"][:, 1:]}, "not a whole"),
        (lambda p: {**p, "qweight": p["qweight"][:, 1:]}, "not a whole"),
        (lambda p: {**p, "qzeros": p["qzeros"][1:]}, "not a whole"),
        (lambda p: {**p, "scales": p["scales"] * float("nan")}, "not finite"),
    ],
)
def test_damaged_parts_are_one_line(method: str, change: Any, text: str) -> None:
    levels = random_levels(np.random.default_rng(1), ROWS, COLUMNS, 128)
    parts = gptq_parts(levels, 4, with_order=False) if method == "gptq" else awq_parts(levels)
    with pytest.raises(SourceError, match=text) as error:
        decoded((gptq_format if method == "gptq" else awq_format)({}), change(parts))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("settings", [{"bits": 8}, {"bits": 3}])
def test_gptq_of_other_bits_than_in_the_config(settings: dict[str, Any]) -> None:
    parts = gptq_parts(random_levels(np.random.default_rng(1), ROWS, COLUMNS, 128), 4)
    with pytest.raises(SourceError, match="shapes say 4 bits"):
        decoded(gptq_format(settings), parts)
    decoded(gptq_format({**settings, "dynamic": {"+:.*": {"bits": 4}}}), parts)


def test_indices_of_groups_that_are_not_there() -> None:
    parts = gptq_parts(random_levels(np.random.default_rng(1), ROWS, COLUMNS, 128), 4)
    with pytest.raises(SourceError, match="group indices"):
        decoded(gptq_format({}), {**parts, "g_idx": parts["g_idx"] + 1})
