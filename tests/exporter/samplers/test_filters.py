"""The filters in turn against the numpy reference. The first sorts few ids, the next more, the last none."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrt.engines import numpy_samplers
from specrt.engines.contract import LOGITS
from specrt.engines.interface import Array
from specrt.engines.samplers import (
    FILTER,
    FILTER_WIDE,
    MIN_P,
    NUCLEUS,
    NUCLEUS_IS_LARGER,
    NUM_SORTED,
    NUM_SORTED_WIDE,
    PROBS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from tests.exporter.samplers.samplers_on_ort import (
    PAIRS,
    TOLERANCE,
    Outputs,
    in_target,
    random_logits,
    row_counts,
    sampler,
    scalar,
    scales,
    seeds,
    temperatures,
)

NEAR_EDGE = 1e-5
FILTERS = (FILTER, FILTER_WIDE, NUCLEUS)


@dataclass(frozen=True)
class Limits:
    """Temperature and filters."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def all(self) -> tuple[float, int, float, float]:
        return self.temperature, self.top_k, self.top_p, self.min_p


def staged(logits: Array, sizes: tuple[int, int], limits: Limits) -> list[Outputs]:
    """What each of the filters gives, each run on what the one before it gave."""
    inputs = {LOGITS: logits, TOP_K: scalar(limits.top_k, "int64")}
    inputs |= {TEMPERATURE: scalar(limits.temperature), TOP_P: scalar(limits.top_p), MIN_P: scalar(limits.min_p)}
    stages: list[Outputs] = []
    for name in FILTERS[0 if limits.top_k <= NUM_SORTED else 1 :]:
        filtering = sampler(name, *sizes)
        wanted = [tensor.name for tensor in filtering.contract.inputs]
        stages.append({**inputs, **filtering.run({key: inputs[key] for key in wanted})})
        inputs = stages[-1]
    return stages


def warped(logits: Array, sizes: tuple[int, int], limits: Limits) -> Array:
    return staged(logits, sizes, limits)[-1][PROBS]


def check_row(probs: Array, z: Array, limits: Limits) -> None:
    """Equal to the reference's row, except for ids where the mass before or up to them is nearly ``top_p``."""
    temperature, top_k, top_p, min_p = limits.all
    expected = numpy_samplers.filtered(z[None], *limits.all)[0]
    scaled = (z / np.float32(temperature)).astype(np.float64)
    weights = np.exp(scaled - scaled.max())
    if 0 < top_k < len(z):
        weights[z < np.sort(z)[-top_k]] = 0
    weights /= weights.sum()
    for id_ in np.flatnonzero((probs > 0) != (expected > 0)):
        before, up_to = weights[scaled > scaled[id_]].sum(), weights[scaled >= scaled[id_]].sum()
        is_at_edge = min(abs(before - top_p), abs(up_to - top_p)) < NEAR_EDGE
        assert is_at_edge or abs(weights[id_] / weights.max() - min_p) < NEAR_EDGE, (id_, before, up_to)
    both = (probs > 0) & (expected > 0)
    np.testing.assert_allclose(
        np.where(both, probs, 0) / probs[both].sum(),
        np.where(both, expected, 0) / expected[both].sum(),
        atol=TOLERANCE,
        rtol=0,
    )
    assert probs.sum() == pytest.approx(1, abs=1e-5)


def is_beyond(z: Array, limits: Limits, num_sorted: int) -> bool | None:
    """Whether ids beyond the ``num_sorted`` most likely belong to the nucleus, in fp64; None near the edge.

    A tie of the last one sorted with top-k's last one counts: what follows may belong to it as well.
    """
    ordered = np.sort((z / np.float32(limits.temperature)).astype(np.float64))[::-1]
    if limits.top_p >= 1 or num_sorted >= len(z):
        return False
    weights = np.exp(ordered - ordered[0])
    if 0 < limits.top_k < len(z):
        if ordered[num_sorted - 1] >= ordered[limits.top_k - 1]:
            return True
        weights[limits.top_k :] = 0
    excess = weights[:num_sorted].sum() / weights.sum() - limits.top_p
    return bool(excess < 0) if abs(excess) > NEAR_EDGE else None


@settings(max_examples=200)
@given(
    seeds,
    st.sampled_from(PAIRS),
    row_counts,
    scales,
    st.builds(
        Limits,
        temperatures,
        st.sampled_from([0, 0, 0, 1, 3, 40, 127, 128, 129, 1000, 1023, 1024]),
        st.sampled_from([0.0, 0.1, 0.9, 0.95, 0.999, 1.0]),
        st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    ),
)
def test_the_filters_together_equal_the_reference(
    seed: int, sizes: tuple[int, int], rows: int, scale: float, limits: Limits
) -> None:
    """Each flags the rows that the next must look at, and gives these top-k alone; all others are final."""
    logits = random_logits(np.random.default_rng(seed), rows, sizes[0], scale)
    logits[:, 0] = 1.0
    targets = in_target(logits, sizes[1])[:, : min(sizes)]
    *sorting, last = staged(logits, sizes, limits)
    for row, z in enumerate(targets):
        check_row(last[PROBS][row, : min(sizes)], z, limits)
        for outputs, num_sorted in zip(sorting[::-1], (NUM_SORTED_WIDE, NUM_SORTED), strict=False):
            flag, probs = outputs[NUCLEUS_IS_LARGER][row], outputs[PROBS][row]
            assert is_beyond(z, limits, num_sorted) in (bool(flag), None)
            if flag:
                top_k_alone = numpy_samplers.filtered(z[None], limits.temperature, limits.top_k)[0]
                np.testing.assert_allclose(probs[: min(sizes)], top_k_alone, atol=TOLERANCE, rtol=0)
            else:
                np.testing.assert_array_equal(last[PROBS][row], probs)
    assert all((outputs[PROBS][:, min(sizes) :] == 0).all() for outputs in (*sorting, last))


@pytest.mark.parametrize("vocab_size", [1500, 2053])
def test_rows_that_end_at_each_of_the_filters_are_filtered_together(vocab_size: int) -> None:
    rng, limits = np.random.default_rng(5), Limits(top_p=0.95)
    logits = rng.normal(size=(6, vocab_size)) * np.array([[0.1], [2], [5], [0.1], [2], [5]])
    first, second, last = staged(logits.astype(np.float32), (vocab_size, vocab_size), limits)
    assert first[NUCLEUS_IS_LARGER].tolist() == [1, 1, 0] * 2
    assert second[NUCLEUS_IS_LARGER].tolist() == [1, 0, 0] * 2
    kept = np.count_nonzero(last[PROBS], axis=1)
    assert (kept[::3] > NUM_SORTED_WIDE).all() and (kept[::3] < vocab_size).all()
    assert (kept[1::3] > NUM_SORTED).all() and (kept[2::3] < NUM_SORTED).all()
    for row, z in zip(last[PROBS], logits.astype(np.float32), strict=True):
        check_row(row, z, limits)


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.99])
def test_a_nucleus_of_most_of_a_large_vocabulary_holds_its_mass(top_p: float) -> None:
    """As many ids as in fp64, or one more or less: each has seven millionths of the mass here."""
    logits = np.random.default_rng(0).normal(0, 0.02, (1, 151_936)).astype(np.float32)
    weights = np.exp(np.sort(logits[0].astype(np.float64)))[::-1]
    expected = int((np.cumsum(weights) < top_p * weights.sum()).sum()) + 1
    probs = warped(logits, (151_936, 151_936), Limits(top_p=top_p))
    assert abs(np.count_nonzero(probs) - expected) <= 1


def test_min_p_also_limits_a_nucleus_that_is_larger() -> None:
    logits = np.random.default_rng(6).normal(0, 0.3, (3, 2053)).astype(np.float32)
    _, wide, last = staged(logits, (2053, 2053), Limits(top_p=0.95, min_p=0.5))
    assert wide[NUCLEUS_IS_LARGER].all()
    np.testing.assert_array_equal(last[PROBS] > 0, numpy_samplers.filtered(logits, 1.0, 0, 1.0, 0.5) > 0)


@pytest.mark.parametrize("top_p", [0.9, 1.0])
@pytest.mark.parametrize(("sizes", "top_k"), [((7, 7), 7), ((7, 7), 50), ((5, 7), 6), ((7, 5), 6), ((900, 1500), 1000)])
def test_a_top_k_of_all_ids_or_more_is_no_limit(sizes: tuple[int, int], top_k: int, top_p: float) -> None:
    logits = np.random.default_rng(7).normal(size=(2, sizes[0])).astype(np.float32)
    probs = warped(logits, sizes, Limits(top_k=top_k, top_p=top_p))
    expected = numpy_samplers.filtered(in_target(logits, sizes[1]), 1.0, 0, top_p)
    np.testing.assert_allclose(probs, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("top_p", [0.2, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("top_k", [3, 100, 128, 601, 700, 1024])
def test_ids_tied_with_top_k_s_last_one_count_however_many(top_k: int, top_p: float) -> None:
    """600 ids lead, 900 tie, so more than were sorted belong to top-k; the mass of the rest does not count."""
    rng, limits = np.random.default_rng(8), Limits(top_k=top_k, top_p=top_p)
    logits = np.concatenate([np.linspace(2, 1, 600), np.zeros(900), np.full(553, -0.1)]).astype(np.float32)
    rng.shuffle(logits)
    probs = warped(np.stack([logits, logits]), (2053, 2053), limits)
    for row in probs:
        check_row(row, logits, limits)
    if top_k > 600 and top_p > 0.9:
        assert (np.count_nonzero(probs, axis=1) == 1500).all()
