"""The variant that a head is used as: the stated one, unless a text of the target clearly speaks for another.

Published heads disagree with their own configs about the numbering of the taps, about norms and about the rotation.
Nothing but the acceptance shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from specrt.engines.errors import PairError
from specrt.exporter.heads.config import HeadVariant
from specrt.exporter.heads.files import LoadedHead
from specrt.exporter.heads.scoring import Chance, Score, Text, candidate_variants, chance_of, score_variants

_CLEARLY = 3.0  # standard errors
_NUM_ROWS = 8  # of the printed table


@dataclass(frozen=True)
class Fit:
    """``variant`` is used. ``scores`` are all candidates', best first; ``warnings`` are lines for the user."""

    variant: HeadVariant
    stated: HeadVariant
    scores: tuple[Score, ...]
    chance: Chance
    warnings: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The table: a line for each of the best candidates, for the stated and for the used one; then the bound."""
        marks = {self.stated: " (stated)"}
        marks[self.variant] = marks.get(self.variant, "") + " (used)"
        shown = [s for i, s in enumerate(self.scores) if i < _NUM_ROWS or s.variant in marks]
        rows: list[tuple[str, ...]] = [("variant", "step 1", "step 2", "step 3", "accepted of 3", "nats")]
        for score in shown:
            steps = [f"{count / score.num_chains:.1%}" for count in score.counts] + ["-", "-"]
            accepted = f"{score.mean_accepted:.2f}" if score.is_complete else "-"
            nats = f"{score.mean_likelihood:.3f}" + marks.get(score.variant, "")
            rows.append((describe(score.variant), *steps[:3], accepted, nats))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        left_out = len(self.scores) - len(shown)
        return [*lines, *([f"({left_out} more with less agreement)"] if left_out else []), str(self.chance)]


def fit_variant(
    head: LoadedHead, texts: Sequence[Text], target_embedding: torch.Tensor, num_layers: int, is_named: bool = False
) -> Fit:
    """Score the candidates on ``texts`` and choose one.

    ``is_named``: the user named the stated variant, which is then used in any case, with a warning where the text
    speaks against it. Raises ``PairError`` with the figures when no candidate is above chance.
    """
    variants = candidate_variants(head, num_layers)
    chance = chance_of(texts, len(variants))
    scores = score_variants(head, texts, target_embedding, variants)
    stated = next(score for score in scores if score.variant == head.stated)
    passing = [score for score in scores if score.is_complete and score.counts[0] >= chance.needed]
    best = _simplest(passing, head.stated)
    if best is None and not is_named:
        top = scores[0]
        raise PairError(
            f"the head predicts the target's text no better than chance: its best variant ({describe(top.variant)}) "
            f"agrees at {top.counts[0]} of {chance.total} positions, expected {chance.needed}; it is not for this "
            "target, or its files need --taps and --norm"
        )
    used = stated if is_named or best is None else best
    return Fit(used.variant, head.stated, tuple(scores), chance, tuple(_warnings(used, stated, best, chance)))


def _simplest(scores: Sequence[Score], stated: HeadVariant) -> Score | None:
    """Of those that the best does not clearly beat, the one with the fewest differences from ``stated``."""
    close = [score for score in scores if scores[0].lead(score) < _CLEARLY]
    return min(close, key=lambda score: len(differences(score.variant, stated)), default=None)


def _warnings(used: Score, stated: Score, best: Score | None, chance: Chance) -> list[str]:
    if best is None:
        return [
            f"the head as named agrees with the target at {used.counts[0]} of {chance.total} positions, no better than "
            f"chance ({chance.needed} needed), and neither does any other variant"
        ]
    if best.variant == stated.variant:
        return []
    of = f"of {chance.total} positions"
    figures = f"{best.counts[0]} {of} at step 1, and {stated.counts[0]} as stated"
    changed = ", ".join(differences(best.variant, stated.variant))
    if used is best:
        return [
            f"the head's config is not how it was trained: {changed} agrees with the target at {figures}; it is used"
        ]
    return [f"another variant than the named one agrees with the target more often: {changed} at {figures}"]


def differences(variant: HeadVariant, stated: HeadVariant) -> list[str]:
    """What ``variant`` has different from ``stated``, as "name value"."""
    names = [field.name for field in fields(variant)]
    changed = [name for name in names if getattr(variant, name) != getattr(stated, name)]
    return [f"{name} {_shown(getattr(variant, name))}" for name in changed]


def describe(variant: HeadVariant) -> str:
    """The variant in one line: its taps, and what is not off."""
    flags = [name for name in ("norm_before_residual", "norm_output") if getattr(variant, name)]
    norm = [] if variant.fc_norm == "none" else [f"fc_norm {variant.fc_norm}"]
    theta = [] if variant.rope_theta is None else [f"rope_theta {variant.rope_theta:g}"]
    return ", ".join([f"taps {_shown(variant.taps)}", *norm, *flags, *theta])


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value).lower()
