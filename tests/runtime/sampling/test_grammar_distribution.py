"""``block`` under a grammar in the real loop: whole texts have the distribution of masked decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from specrt.runtime.completion import Completion
from specrt.runtime.drafting.constrained import ConstrainedModelDrafter
from specrt.runtime.drafting.drafters import ModelDrafter
from specrt.runtime.round import generate_rounds
from specrt.runtime.sampling.draft_sampler import DraftSampler
from specrt.runtime.sampling.grammar import Constraint
from specrt.runtime.settings import Settings
from specrt.runtime.target import Target
from tests.runtime.sampling.grammars import grammars_of, regex
from tests.runtime.sampling.test_distribution import NORMAL_QUANTILE, Tokens, excess
from tests.runtime.support.fakes import Pair, pair_of
from tests.runtime.support.plain import distribution
from tests.runtime.support.tables import hashed_logits, noisy

TOKENS = [b"a", b"b", b"ab", b"<end>"]
EOS, PROMPT, NUM_RUNS = 3, [1, 2], 2000
SETTINGS = Settings(
    temperature=1.5, draft="model", rule="block", num_speculative_tokens=3, max_new_tokens=12, ending_ids=(EOS,)
)
TABLE = hashed_logits(1, len(TOKENS))
PATTERN = "(a|b){2}a?(b|ab)?"


def chances(constraint: Constraint, tokens: Tokens = ()) -> dict[Tokens, float]:
    """The chance of each text, by masked decoding."""
    if constraint.is_complete(PROMPT, tokens):
        return {tokens: 1.0}
    mask = constraint.mask(PROMPT, tokens)
    logits = TABLE([*PROMPT, *tokens]).astype(np.float64)
    logits[[token for token in range(len(TOKENS)) if not mask.allows(token)]] = -np.inf
    found: dict[Tokens, float] = {}
    for token, chance in enumerate(distribution(logits, SETTINGS)):
        if chance > 0:
            found |= {text: chance * rest for text, rest in chances(constraint, (*tokens, token)).items()}
    return found


class CutsAfterDrawing(ConstrainedModelDrafter):
    """Draws from all ids, and drops what the grammar forbids: the classic mistake."""

    _draft = ModelDrafter._draft

    def propose(self, committed: Sequence[int], k: int) -> list[int]:
        drafted = super().propose(committed, k)
        kept: list[int] = []
        for token in drafted:
            if self._constraint.is_complete(committed, kept) or not self._constraint.mask(committed, kept).allows(
                token
            ):
                break
            kept.append(token)
        return kept


def texts_of(
    drafter_class: type[ConstrainedModelDrafter], tokens: Sequence[bytes], pattern: str, num_runs: int
) -> tuple[Counter[Tokens], Pair]:
    """How often each text came, over seeds 0, 1 .., and the models that gave them."""
    pair = pair_of(TABLE, noisy(TABLE, 2, len(tokens), 0.5), len(tokens))
    grammars = grammars_of(tokens, [EOS])
    found: Counter[Tokens] = Counter()
    for seed in range(num_runs):
        settings = replace(SETTINGS, seed=seed)
        constraint = grammars.constraint(regex(pattern), [EOS], len(PROMPT))
        pair.target.begin(PROMPT, 1)
        pair.draft.begin(PROMPT, 1)
        masks = None if drafter_class is CutsAfterDrawing else constraint
        sampler = DraftSampler(pair.draft, pair.target, settings, len(PROMPT), masks)
        drafter = drafter_class(pair.draft.model, sampler, len(tokens), constraint)
        completion = Completion(PROMPT, settings, 256, constraint=constraint)
        for _ in generate_rounds(completion, Target(pair.target, settings, len(PROMPT), constraint), drafter):
            pass
        found[tuple(completion.new_tokens)] += 1
    return found, pair


def excess_of(drafter_class: type[ConstrainedModelDrafter]) -> float:
    found, _ = texts_of(drafter_class, TOKENS, PATTERN, NUM_RUNS)
    return excess(found, chances(grammars_of(TOKENS, [EOS]).constraint(regex(PATTERN), [EOS], len(PROMPT))))


def test_texts_have_the_distribution_of_masked_decoding() -> None:
    assert excess_of(ConstrainedModelDrafter) < NORMAL_QUANTILE


def test_a_draft_that_is_cut_after_drawing_is_found() -> None:
    assert excess_of(CutsAfterDrawing) > NORMAL_QUANTILE


def test_forced_ids_are_accepted_and_take_no_pass_of_the_draft() -> None:
    found, pair = texts_of(ConstrainedModelDrafter, [b"a", b"b", b"c", b"<end>"], "abcabcabc", 1)
    assert list(found) == [(0, 1, 2) * 3]
    assert len(pair.draft_engine.widths) == 1, "the prompt's"
    assert pair.engine.rows == [1, 4, 4], "1 + 4 + 4 tokens"
