"""Simulated n-gram lookups: the draft at a position of a known text, and how much of it is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specrt.runtime.drafting.drafters import NGramDrafter


@dataclass(frozen=True)
class Lookup:
    """``size``: the tokens of the suffix that occurs earlier, 0 for none; then the drafted and the correct tokens."""

    size: int
    num_drafted: int
    num_accepted: int


def look_up(drafter: NGramDrafter, tokens: Sequence[int], place: int, k: int) -> Lookup:
    """The draft of ``drafter`` after ``tokens[:place]``, at most ``k`` tokens, and how many of these the text confirms.

    Drafted tokens beyond the end of the text are not counted, since they were not verified.
    """
    committed = tokens[:place]
    size = drafter.suffix_length(committed)
    if not size or k < 1:
        return Lookup(size, 0, 0)
    drafted = drafter.propose(committed, k)[: len(tokens) - place]
    following = tokens[place : place + len(drafted)]
    pairs = enumerate(zip(drafted, following, strict=True))
    return Lookup(size, len(drafted), next((i for i, (ours, theirs) in pairs if ours != theirs), len(drafted)))
