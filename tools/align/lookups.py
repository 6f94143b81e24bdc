"""What an n-gram lookup would have drafted at a place of a text that is known: one room for all who simulate it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specrt.runtime.drafting.drafters import NGramDrafter


@dataclass(frozen=True)
class Lookup:
    """``size``: the tokens of the suffix that was found earlier, 0 for none; then drafted tokens, and those right."""

    size: int
    num_drafted: int
    num_accepted: int


def look_up(drafter: NGramDrafter, tokens: Sequence[int], place: int, k: int) -> Lookup:
    """What ``drafter`` drafts after ``tokens[:place]``, at most ``k``, and how much of it the text goes on with.

    Drafted tokens beyond the end of the text are not counted: nobody verified them.
    """
    committed = tokens[:place]
    size = drafter.suffix_length(committed)
    if not size or k < 1:
        return Lookup(size, 0, 0)
    drafted = drafter.propose(committed, k)[: len(tokens) - place]
    following = tokens[place : place + len(drafted)]
    pairs = enumerate(zip(drafted, following, strict=True))
    return Lookup(size, len(drafted), next((i for i, (ours, theirs) in pairs if ours != theirs), len(drafted)))
