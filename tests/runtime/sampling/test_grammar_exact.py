"""Exact distributions of all texts of a grammar: masked speculation gives those of masked plain decoding.

Four ids (one ends the text), random models, the masks of llguidance, and the reference's rules in rational numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial

import numpy as np
import pytest

from specrt.engines import numpy_samplers
from specrt.runtime.sampling.grammar import Constraint
from tests.engines.numpy_samplers.enumeration import (
    Distribution,
    Model,
    Proposal,
    Row,
    Tokens,
    Uniforms,
    by_round,
    common,
    exact_distribution,
    random_model,
    sample,
)
from tests.runtime.sampling.grammars import constraint_of

TOLERANCE = 1e-12
TOKENS = [b"a", b"b", b"ab", b"<end>"]
EOS = 3
# Places with one id, with several, where the text may end or go on, and where nothing but the end is left
PATTERNS = ["ab(b|a)?|bba", "(a|b){2}a?", "ba?(ab)?b"]

each_pattern = pytest.mark.parametrize("pattern", PATTERNS)


def positive_model(seed: int) -> Model:
    """A random one in which no id is impossible: then the grammar always leaves one."""
    model = random_model(seed, len(TOKENS), 9)
    return lambda prefix: Row(tuple((4 * weight + Fraction(1, 4)) / 5 for weight in model(prefix).weights))


@dataclass(frozen=True)
class MaskedPair:
    """Target and draft of at most ``k`` ids under a grammar. The last two are faults, for negative controls."""

    target: Model
    draft: Model
    constraint: Constraint
    k: int
    masks_after_drawing: bool = False
    leaves_bonus_row: bool = False

    def masked(self, model: Model, prefix: Tokens) -> Row:
        mask = self.constraint.mask((), prefix)
        weights = [w if mask.allows(i) else Fraction(0) for i, w in enumerate(model(prefix).weights)]
        return Row(tuple(w / sum(weights) for w in weights))

    def p(self, prefix: Tokens, is_bonus: bool) -> Row:
        if self.has_ended(prefix) or (is_bonus and self.leaves_bonus_row):
            return self.target(prefix)
        return self.masked(self.target, prefix)

    def has_ended(self, tokens: Tokens) -> bool:
        return self.constraint.is_complete((), tokens)

    def propose(self, prefix: Tokens, uniforms: Uniforms, stream: str, keys: Callable[..., object]) -> Proposal:
        drafted: Tokens = ()
        q: list[Row] = []
        while len(drafted) < self.k and not self.has_ended(prefix + drafted):
            after = prefix + drafted
            forced = self.constraint.forced((), after)
            if forced is not None:
                q.append(Row(tuple(Fraction(i == forced) for i in range(len(TOKENS)))))
                drafted += (forced,)
                continue
            row = self.draft(after) if self.masks_after_drawing else self.masked(self.draft, after)
            token = sample(row, uniforms, keys(stream, len(prefix), len(drafted)))
            if not self.constraint.mask((), after).allows(token):
                break
            q.append(row)
            drafted += (token,)
        p = [self.p(prefix + drafted[:i], i == len(drafted)) for i in range(len(drafted) + 1)]
        return Proposal(tuple(p), tuple(q), drafted)

    def block(self, prefix: Tokens, uniforms: Uniforms) -> Tokens:
        """What a round of ``block`` commits."""
        proposal, start = self.propose(prefix, uniforms, "draft", by_round), len(prefix)
        accepted = 0
        if proposal.drafted:
            eta = [uniforms.at(by_round("eta", start, i), [edge]) for i, edge in enumerate(proposal.edges)]
            given = *proposal.fp32, np.array(proposal.drafted), np.array(eta, np.float32)
            accepted, _ = numpy_samplers.block(*given, (0.5, 0.5))
        token = sample(proposal.next_row(accepted), uniforms, by_round("final", start, accepted))
        return self.cut(prefix, (*proposal.drafted[:accepted], token))

    def match(self, prefix: Tokens, uniforms: Uniforms) -> Tokens:
        """What a round of ``match`` commits; the draft draws with the target's uniforms."""
        proposal = self.propose(prefix, uniforms, "draft", common)
        tokens = [sample(row, uniforms, common("", len(prefix), i)) for i, row in enumerate(proposal.p)]
        accepted = numpy_samplers.match(np.array(tokens), np.array(proposal.drafted, np.int64))
        return self.cut(prefix, (*proposal.drafted[:accepted], tokens[accepted]))

    def cut(self, prefix: Tokens, new: Tokens) -> Tokens:
        """Up to the end of the text, or to the first id outside the grammar."""
        for end in range(1, len(new) + 1):
            before, token = prefix + new[: end - 1], new[end - 1]
            if not self.constraint.mask((), before).allows(token) or self.has_ended(prefix + new[:end]):
                return new[:end]
        return new

    def is_done(self, tokens: Tokens) -> bool:
        allowed = all(self.constraint.mask((), tokens[:i]).allows(tokens[i]) for i in range(len(tokens)))
        return not allowed or self.has_ended(tokens)


def plain_texts(pair: MaskedPair, prefix: Tokens = ()) -> Distribution:
    """The distribution of masked decoding, id by id."""
    if pair.has_ended(prefix):
        return {prefix: Fraction(1)}
    found: Distribution = defaultdict(Fraction)
    for token, weight in enumerate(pair.masked(pair.target, prefix).weights):
        for text, chance in plain_texts(pair, (*prefix, token)).items() if weight else ():
            found[text] += weight * chance
    return found


def block_texts(pair: MaskedPair) -> Distribution:
    """Of rounds of ``block``, whose uniforms are independent."""

    @cache
    def after(prefix: Tokens) -> Distribution:
        if pair.is_done(prefix):
            return {prefix: Fraction(1)}
        found: Distribution = defaultdict(Fraction)
        for new, chance in exact_distribution(partial(pair.block, prefix)).items():
            for text, weight in after(prefix + new).items():
                found[text] += chance * weight
        return found

    return after(())


def match_texts(pair: MaskedPair) -> Distribution:
    """Of rounds of ``match``, which verify a position again with the same uniform."""

    def program(uniforms: Uniforms) -> Tokens:
        text: Tokens = ()
        while not pair.is_done(text):
            text += pair.match(text, uniforms)
        return text

    return exact_distribution(program, ends=False)


def distance(found: Distribution, expected: Distribution) -> float:
    """Total variation."""
    nothing = Fraction(0)
    differences = (abs(found.get(text, nothing) - expected.get(text, nothing)) for text in {*found, *expected})
    return float(sum(differences, nothing)) / 2


def pair_of(pattern: str, k: int, seed: int = 0, **faults: bool) -> MaskedPair:
    constraint = constraint_of(TOKENS, pattern, [EOS])
    return MaskedPair(positive_model(seed), positive_model(seed + 100), constraint, k, **faults)


@each_pattern
def test_plain_masked_decoding_gives_every_text_of_the_grammar(pattern: str) -> None:
    texts = plain_texts(pair_of(pattern, 0))
    assert sum(texts.values()) == 1
    written = {b"".join(TOKENS[token] for token in text if token != EOS) for text in texts}
    expected = {"ab(b|a)?|bba": 4, "(a|b){2}a?": 8, "ba?(ab)?b": 4}[pattern]
    assert len(written) == expected < len(texts)


@each_pattern
@pytest.mark.parametrize("k", [1, 2, 3])
def test_block_gives_the_texts_of_masked_decoding(pattern: str, k: int) -> None:
    pair = pair_of(pattern, k)
    assert distance(block_texts(pair), plain_texts(pair)) <= TOLERANCE


@each_pattern
@pytest.mark.parametrize("k", [1, 2, 3])
def test_match_gives_the_texts_of_masked_decoding(pattern: str, k: int) -> None:
    pair = pair_of(pattern, k)
    assert distance(match_texts(pair), plain_texts(pair)) <= TOLERANCE


@pytest.mark.parametrize("k", [1, 2])
def test_a_mask_after_drawing_biases_block(k: int) -> None:
    pair = pair_of("(a|b){2}a?", k, masks_after_drawing=True)
    assert distance(block_texts(pair), plain_texts(pair)) > 0.002


@pytest.mark.parametrize("texts", [block_texts, match_texts])
def test_a_bonus_row_without_a_mask_gives_texts_outside_the_grammar(
    texts: Callable[[MaskedPair], Distribution],
) -> None:
    pair = pair_of("(a|b){2}a?", 2, leaves_bonus_row=True)
    assert distance(texts(pair), plain_texts(pair)) > 0.002
