"""Real grammars on small vocabularies."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specrt.runtime.sampling.grammar import Constraint, Grammars, Vocabulary
from specrt.runtime.structured import Grammar, grammar_of


def grammars_of(tokens: Sequence[bytes], eos: Sequence[int] = (), special: Collection[int] = ()) -> Grammars:
    """Of a model with these tokens, by id."""
    return Grammars(lambda: Vocabulary(tokens.__getitem__, special, len(tokens)), eos)


def regex(pattern: str) -> Grammar:
    grammar = grammar_of(regex=pattern)
    assert grammar is not None
    return grammar


def constraint_of(
    tokens: Sequence[bytes], pattern: str, eos: Sequence[int] = (), num_prompt_tokens: int = 0
) -> Constraint:
    """A new one; ``eos`` ends texts."""
    return grammars_of(tokens, eos).constraint(regex(pattern), eos, num_prompt_tokens)
