"""The random numbers: Philox as its authors define it, and numbers that depend on their key alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrt.engines.interface import Array
from specrt.engines.samplers import NUM_UNIFORMS
from specrt.runtime.sampling.uniforms import DRAFT, MAX_SEED, POSITION, VERIFY, Uniforms

MASK = 2**64 - 1
SEEDS = st.one_of(st.integers(0, MAX_SEED), st.sampled_from([0, 1, 2**32, 2**63 - 1, 2**63, MAX_SEED]))
NUMBERS = st.integers(0, 200_000)
COUNTS = st.integers(1, 20)


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> list[int]:
    """Philox4x64-10 (Salmon et al. 2011, section 4.3), in whole numbers."""
    words, keys = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * words[0], 0xCA5A826395121157 * words[2]
        words = [
            (second >> 64) ^ words[1] ^ keys[0],
            second & MASK,
            (first >> 64) ^ words[3] ^ keys[1],
            first & MASK,
        ]
        keys = [(keys[0] + 0x9E3779B97F4A7C15) & MASK, (keys[1] + 0xBB67AE8584CAA73B) & MASK]
    return words


def uniforms(seed: int, stream: int, low: int, high: int) -> list[float]:
    """The first words of a block, their upper 24 bits as a fraction. numpy counts up before it generates."""
    return [(word >> 40) / 2**24 for word in philox((seed, stream), (low + 1, high, 0, 0))[:NUM_UNIFORMS]]


def test_the_reference_gives_the_authors_known_answers() -> None:
    """Of kat_vectors in Random123: all zeros, and all ones."""
    zeros = philox((0, 0), (0, 0, 0, 0))
    assert zeros == [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    ones = philox((MASK, MASK), (MASK, MASK, MASK, MASK))
    assert ones == [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0]


@given(SEEDS, NUMBERS, COUNTS)
def test_numbers_of_positions_are_philox_at_the_position(seed: int, first: int, count: int) -> None:
    expected = [uniforms(seed, 0, first + i, 0) for i in range(count)]
    assert Uniforms(seed).at_positions(first, count).tolist() == expected


@given(SEEDS, st.sampled_from([(DRAFT, 1), (VERIFY, 2)]), NUMBERS, COUNTS)
def test_numbers_of_a_round_are_philox_at_the_row_and_the_round(
    seed: int, stream: tuple[int, int], num_committed: int, count: int
) -> None:
    expected = [uniforms(seed, stream[1], row, num_committed) for row in range(count)]
    assert Uniforms(seed).of_round(stream[0], num_committed, count).tolist() == expected


@given(SEEDS, NUMBERS, COUNTS)
def test_a_position_s_numbers_do_not_depend_on_where_the_call_began(seed: int, first: int, count: int) -> None:
    rows = Uniforms(seed).at_positions(first, count)
    for offset in range(count):
        assert Uniforms(seed).at_positions(first + offset, 1).tolist() == rows[offset : offset + 1].tolist()
        assert Uniforms(seed).at_positions(first + offset, count)[: count - offset].tolist() == rows[offset:].tolist()


@given(SEEDS, st.sampled_from([DRAFT, VERIFY]), NUMBERS, COUNTS)
def test_a_round_of_fewer_rows_begins_as_one_of_more(seed: int, stream: int, num_committed: int, count: int) -> None:
    rows = Uniforms(seed).of_round(stream, num_committed, 20)
    assert Uniforms(seed).of_round(stream, num_committed, count).tolist() == rows[:count].tolist()


def test_nothing_drawn_before_matters() -> None:
    used = Uniforms(7)
    for count in range(1, 9):
        used.at_positions(3, count)
        used.of_round(VERIFY, 3, count)
    assert used.at_positions(5, 4).tolist() == Uniforms(7).at_positions(5, 4).tolist()
    assert used.of_round(DRAFT, 5, 4).tolist() == Uniforms(7).of_round(DRAFT, 5, 4).tolist()


def every_row() -> Iterator[Array]:
    """Of several seeds: 200 positions; 100 rounds of 9 rows on each stream, at commit counts next to each other."""
    for seed in (0, 1, 2, 2**32, 2**63, MAX_SEED):
        numbers = Uniforms(seed)
        yield numbers.at_positions(0, 200)
        for stream, num_committed in product((DRAFT, VERIFY), range(100)):
            yield numbers.of_round(stream, num_committed, 9)


def test_no_two_keys_share_a_row() -> None:
    """72 bits a row: two of 12,000 rows would be equal by chance once in 10**13."""
    rows = np.concatenate(list(every_row()))
    assert len(rows) == 6 * (200 + 2 * 100 * 9)
    assert len(np.unique(rows, axis=0)) == len(rows)


@pytest.mark.parametrize("column", range(NUM_UNIFORMS))
def test_keys_next_to_each_other_are_uncorrelated(column: int) -> None:
    """12,000 numbers: means within 4.5 deviations of 1/2, and correlations of neighbours within 4.5 of 0."""
    values = np.concatenate(list(every_row()))[:, column].astype(np.float64) - 0.5
    limit = 4.5 / np.sqrt(len(values))
    assert abs(values.mean()) < limit * np.sqrt(1 / 12)
    for lag in (1, 9, 18):
        assert abs((values[lag:] * values[:-lag]).mean() * 12) < limit
    others = np.concatenate(list(every_row())).astype(np.float64) - 0.5
    for other in set(range(NUM_UNIFORMS)) - {column}:
        assert abs((values * others[:, other]).mean() * 12) < limit


def test_streams_have_different_numbers() -> None:
    assert len({POSITION, DRAFT, VERIFY}) == 3


def test_numbers_are_fractions_of_24_bits_below_one() -> None:
    """So that fp32 holds them exactly and none rounds to 1."""
    rows = np.concatenate(list(every_row()))
    assert rows.dtype == np.float32
    assert (rows.min() >= 0) and (rows.max() < 1)
    scaled = rows.astype(np.float64) * 2**24
    assert np.array_equal(scaled, np.floor(scaled))
    assert (scaled % 2 == 1).any() and rows.min() < 2**-10 and rows.max() > 1 - 2**-10


@pytest.mark.parametrize("count", [1, 2, 9])
def test_a_call_gives_a_row_of_three_for_each_number(count: int) -> None:
    assert Uniforms(3).at_positions(4, count).shape == (count, NUM_UNIFORMS)
    assert Uniforms(3).of_round(VERIFY, 4, count).shape == (count, NUM_UNIFORMS)
