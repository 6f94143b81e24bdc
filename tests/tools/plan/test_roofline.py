"""The roofline by hand-made figures: the bottleneck, how many tokens a round gives, the best K, break-even, the fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specrt.engines.errors import UsageError
from specrt.engines.experts import Experts
from specrt.tools.plan.roofline import (
    Device,
    ModelCost,
    Rounds,
    device_rows,
    device_table,
    device_text,
    expected_tokens,
    find_device,
    fit_device,
    pass_s,
    rounds_of,
)

GPU = Device("gpu", 10**10, 1e9, 1e10, 0.0, True, "made up")
CPU = replace(GPU, overlaps=False, node_overhead_us=10.0)
MODEL = ModelCost("m", 2048, 10**9, 10**9, 10**6, 1000, 0, 2 * 10**9, 100)
DRAFT = replace(MODEL, bytes_per_pass=10**8, flops_per_token=2 * 10**8)


def test_a_gpu_takes_the_longer_of_memory_and_arithmetic() -> None:
    assert pass_s(MODEL, GPU, 1, 0) == 1.0
    assert pass_s(MODEL, GPU, 5, 0) == pytest.approx(1.0)
    assert pass_s(MODEL, GPU, 10, 0) == pytest.approx(2.0)
    assert pass_s(MODEL, GPU, 1, 10**6) == pytest.approx(2.0)


def test_a_cpu_takes_their_sum_and_its_overhead() -> None:
    assert pass_s(MODEL, CPU, 5, 0) == pytest.approx(1.0 + 1.0 + 100 * 10e-6)


def test_the_tokens_of_a_round() -> None:
    assert expected_tokens((1.0,), 4) == 5
    assert expected_tokens((0.0,), 4) == 1
    assert expected_tokens((0.5,), 2) == 1.75
    assert expected_tokens((0.5, 1.0), 3) == 1 + 0.5 * 3
    assert expected_tokens((0.8,), 3) == pytest.approx((1 - 0.8**4) / (1 - 0.8))


def test_the_best_k_is_where_most_tokens_a_second_are() -> None:
    rounds = rounds_of(MODEL, DRAFT, GPU, 4, 0)
    assert rounds.round_s == pytest.approx((1.0, 1.1, 1.2, 1.3, 1.4))
    assert rounds.best_k((0.9,)) == 4
    assert rounds.best_k((0.6,)) == 3
    assert rounds.best_k((0.3,)) == 1
    assert rounds.best_k((0.05,)) == 0
    assert rounds.speedup((0.9,), 1) == pytest.approx(1.9 / 1.1)


def test_without_a_draft_model_drafting_is_free() -> None:
    assert rounds_of(MODEL, None, GPU, 4, 0).round_s == pytest.approx((1.0,) * 5)


def test_break_even_is_the_acceptance_that_wins_nothing() -> None:
    rounds = rounds_of(MODEL, DRAFT, GPU, 4, 0)
    assert rounds.break_even(1) == pytest.approx(0.1)
    even = rounds.break_even(4)
    assert even is not None and rounds.speedup((even,), 4) == pytest.approx(1.0)
    assert Rounds(1.0, (1.0, 3.0)).break_even(1) is None


def test_the_fit_finds_the_device_that_made_the_times() -> None:
    device = replace(CPU, flops_per_s=3e10, node_overhead_us=25.0)
    times = {width: pass_s(MODEL, device, width, 50) * 1e3 for width in (1, 2, 4, 9)}
    fitted = fit_device(replace(CPU, flops_per_s=1.0, node_overhead_us=0.0), MODEL, 50, times)
    assert fitted.flops_per_s == pytest.approx(3e10)
    assert fitted.node_overhead_us == pytest.approx(25.0)


EXPERTS = Experts(num_layers=10, num_experts=8, experts_per_token=2, bytes_per_expert=4 * 10**7)
MIXTURE = replace(MODEL, weights_bytes=34 * 10**8, experts=EXPERTS)


def test_a_pass_of_more_tokens_reads_more_experts() -> None:
    assert MIXTURE.read_bytes(1) == 10**9 == MODEL.read_bytes(9)
    assert MIXTURE.read_bytes(2) == 10**9 + round(4 * 10**8 * (8 * (1 - 0.75**2) - 2))
    assert MIXTURE.read_bytes(100) == pytest.approx(34 * 10**8, rel=1e-6)
    assert pass_s(MIXTURE, GPU, 2, 0) == pytest.approx(1.6)


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8, 0.9, 1.0])
def test_speculation_gains_less_on_a_mixture_than_on_a_dense_model_of_the_same_bytes(rate: float) -> None:
    """Where memory decides. The first drafted tokens cost most, since later ones find experts that are read already."""
    device = replace(GPU, flops_per_s=1e12)
    dense, mixture = (rounds_of(model, DRAFT, device, 8, 0) for model in (MODEL, MIXTURE))
    assert mixture.best_k((rate,)) <= dense.best_k((rate,))
    assert all(mixture.speedup((rate,), k) < dense.speedup((rate,), k) for k in range(1, 9))
    even = mixture.break_even(1), dense.break_even(1)
    assert even[0] is not None and even[1] is not None and even[0] > even[1]
    if rate == 0.6:
        assert (mixture.best_k((rate,)), dense.best_k((rate,))) == (0, 3)


def test_the_fit_finds_the_device_behind_a_mixture() -> None:
    device = replace(CPU, flops_per_s=3e10, node_overhead_us=25.0)
    times = {width: pass_s(MIXTURE, device, width, 50) * 1e3 for width in (1, 2, 4, 9)}
    fitted = fit_device(replace(CPU, flops_per_s=1.0, node_overhead_us=0.0), MIXTURE, 50, times)
    assert fitted.flops_per_s == pytest.approx(3e10)
    assert fitted.node_overhead_us == pytest.approx(25.0)


def test_times_that_do_not_grow_are_refused() -> None:
    with pytest.raises(UsageError, match="do not take longer with more rows"):
        fit_device(CPU, MODEL, 0, {1: 2.0, 2: 1.9})


def test_the_table_names_its_sources_and_is_plausible() -> None:
    table = device_table()
    assert len(table) >= 20
    assert all(row.source.startswith("NVIDIA ") for row in table.values())
    for line in device_rows():
        assert line.url.startswith(
            ("https://www.nvidia.com/", "https://images.nvidia.com/", "https://docs.nvidia.com/")
        )
        assert line.checked.split(":")[0].split(" ")[0] in ("quoted", "arithmetic", "not"), line.key
        assert 50 <= line.bandwidth_gb_per_s <= 10_000, line.key
        assert 4 <= line.memory_gb <= 300, line.key
        assert table[line.key].bandwidth_bytes_per_s == pytest.approx(0.8e9 * line.bandwidth_gb_per_s)
        peaks = line.dense_tflops
        assert set(peaks) <= {"fp16", "fp8", "int8", "int4", "fp4"} and len(peaks) >= 2, line.key
        for lower, higher in (("fp16", "fp8"), ("fp16", "int8"), ("fp8", "fp4"), ("int8", "int4"), ("fp16", "fp4")):
            if {lower, higher} <= set(peaks):  # each step to half of the bits doubles the peak, within rounding
                assert 1.95 * peaks[lower] <= peaks[higher] <= 8.1 * peaks[lower], (line.key, lower, higher)
    for row in table.values():  # no GPU so far is bound by memory beyond some hundred operations a byte, or at none
        assert 50 < row.flops_per_s / row.bandwidth_bytes_per_s < 1000, row.name


def test_a_device_is_found_by_name_or_in_a_file(tmp_path: Path) -> None:
    assert find_device("rtx-4090").name == "GeForce RTX 4090"
    file = tmp_path / "mine.json"
    file.write_text(device_text(CPU))
    assert find_device(str(file)) == CPU
    file.write_text(json.dumps({"name": "x"}))
    for name in (str(file), str(tmp_path / "none.json")):
        with pytest.raises(UsageError, match="not a device file"):
            find_device(name)
    with pytest.raises(UsageError, match="expected one of orin-nano-8gb"):
        find_device("abacus")
