"""Lookups over a known text: what is drafted at a place, and how much of it is right."""

from __future__ import annotations

import pytest

from specrt.runtime.drafting.drafters import NGramDrafter
from specrt.tools.align.lookups import Lookup, look_up

TEXT = [1, 2, 3, 4, 1, 2, 3, 9, 7]


@pytest.mark.parametrize(
    ("place", "k", "expected"),
    [
        (4, 3, Lookup(0, 0, 0)),  # 4 is new
        (5, 3, Lookup(1, 3, 2)),  # after 1: 2 3 4, the text says 2 3 9
        (6, 3, Lookup(2, 3, 1)),
        (6, 1, Lookup(2, 1, 1)),
        (7, 3, Lookup(3, 2, 0)),  # two tokens are left to verify
        (5, 0, Lookup(1, 0, 0)),
        (8, 3, Lookup(0, 0, 0)),
    ],
)
def test_a_lookup_by_hand(place: int, k: int, expected: Lookup) -> None:
    assert look_up(NGramDrafter(3, 1), TEXT, place, k) == expected


def test_places_in_turn_are_as_places_alone() -> None:
    """The drafter indexes incrementally, without later tokens."""
    drafter = NGramDrafter(3, 1)
    for place in range(1, len(TEXT)):
        assert look_up(drafter, TEXT, place, 3) == look_up(NGramDrafter(3, 1), TEXT, place, 3)
