"""Where drafts come from: n-gram lookup against a brute-force search, and the bounds of a model's drafts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrt.engines.contract import ModelSpec
from specrt.engines.fake import NextToken, fake_spec
from specrt.runtime.drafting.drafters import ModelDrafter, NGramDrafter
from tests.runtime.support.fakes import Draft, Engine, open_draft


def look_up(committed: list[int], k: int, max_n: int = 4, min_n: int = 2) -> list[int]:
    """The definition: the longest suffix that occurs earlier, its latest occurrence, what follows there, cyclically."""
    for size in range(max_n, min_n - 1, -1):
        for start in range(len(committed) - size - 1, -1, -1):  # so that a token follows the occurrence
            if committed[start : start + size] == committed[-size:]:
                extended = list(committed)
                for follower in range(start + size, start + size + k):
                    extended.append(extended[follower])
                return extended[len(committed) :]
    return []


SEQUENCES = st.lists(st.integers(0, 2), max_size=30)
ROUNDS = st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 2), min_size=1, max_size=4)), max_size=9)


@settings(max_examples=200)
@given(SEQUENCES, st.integers(0, 9), st.integers(1, 5), st.integers(0, 4))
def test_n_gram_drafts_are_those_of_the_definition(committed: list[int], k: int, min_n: int, more: int) -> None:
    drafted = NGramDrafter(min_n + more, min_n).propose(committed, k)
    assert drafted == look_up(committed, k, min_n + more, min_n)


@settings(max_examples=200)
@given(
    SEQUENCES, st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 2), min_size=1, max_size=4)), max_size=9)
)
def test_an_index_that_grows_answers_as_one_made_again(prompt: list[int], rounds: list[tuple[int, list[int]]]) -> None:
    """Each round commits some of the draft and then other tokens: what was drafted and rejected must leave no trace."""
    drafter, committed = NGramDrafter(), list(prompt)
    drafter.prefill(committed)
    for num_accepted, others in rounds:
        drafted = drafter.propose(committed, 5)
        assert drafted == look_up(committed, 5)
        committed += drafted[:num_accepted] + others
        drafter.rollback(len(committed))
    assert drafter.propose(committed, 5) == look_up(committed, 5)


@pytest.mark.parametrize(
    ("committed", "drafted"),
    [
        ([], []),
        ([1], []),
        ([1, 1], []),  # the pair occurs, but nothing follows it
        ([1, 1, 1], [1, 1, 1, 1]),
        ([1, 2, 3, 1], []),  # one token is too little
        ([1, 2, 3, 1, 2], [3, 1, 2, 3]),  # the copy goes on in the draft itself
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2, 4]),  # the latest occurrence
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], [3, 8, 1, 2]),  # the longer suffix before the later occurrence
        ([5, 1, 2, 3, 4, 9, 6, 1, 2, 3, 4, 8, 5, 1, 2, 3, 4], [8, 5, 1, 2]),  # four tokens at most are compared
    ],
)
def test_n_gram_drafts_of_four(committed: list[int], drafted: list[int]) -> None:
    assert NGramDrafter().propose(committed, 4) == drafted


def test_only_new_tokens_are_indexed() -> None:
    class Watched(list[int]):
        lowest = 10**9

        def __getitem__(self, key: Any) -> Any:
            self.lowest = min(self.lowest, key.start if isinstance(key, slice) else key)
            return super().__getitem__(key)

    committed, drafter = Watched(range(500)), NGramDrafter()
    drafter.prefill(committed)
    assert committed.lowest == 0
    for token in range(500, 510):
        committed.append(token)
        committed.lowest = 10**9
        assert drafter.propose(committed, 5) == []
        assert committed.lowest >= len(committed) - 5


# --- a model that drafts -------------------------------------------------------------------------------------------

VOCAB_SIZE = 64


def count_up(prefix: Sequence[int]) -> int:
    """The token after the last one, and a token that shows the fault when the cache is not what was committed."""
    return (prefix[-1] + 1) % VOCAB_SIZE if all(b - a == 1 for a, b in pairwise(prefix)) else 0


def tight_spec(max_seq_len: int, vocab_size: int = VOCAB_SIZE) -> ModelSpec:
    """No slot beyond the context, one row a pass, and passes of at most 3 tokens: all that a draft needs."""
    spec = fake_spec(vocab_size, max_seq_len)
    return ModelSpec(vocab_size, max_seq_len, max_seq_len, 3, 1, spec.dtype, spec.kv_layers)


def draft_of(spec: ModelSpec, next_token: NextToken = count_up) -> tuple[Engine, Draft]:
    engine = Engine(spec, next_token)
    return engine, open_draft(engine)


@pytest.mark.parametrize("k", range(1, 7))
def test_a_draft_takes_one_pass_a_token_after_any_commit(k: int) -> None:
    engine, draft = draft_of(tight_spec(60))
    drafter = ModelDrafter(*draft, VOCAB_SIZE)
    committed = [5]
    for accepted in (k, 0, k, k - 1, 1):
        passes = engine.num_passes
        drafted = drafter.propose(committed, k)
        assert drafted == list(range(committed[-1] + 1, committed[-1] + 1 + k))
        assert engine.num_passes == passes + k
        committed += range(committed[-1] + 1, committed[-1] + 2 + accepted)
        drafter.rollback(len(committed))
        # The last drafted token is never fed, so after full acceptance two tokens wait.
        assert draft.model.kv_len == min(len(committed) - 1, len(committed) - 1 - accepted + k - 1)


def test_catching_up_feeds_what_is_committed_and_drafts_nothing() -> None:
    engine, draft = draft_of(tight_spec(60))
    drafter = ModelDrafter(*draft, VOCAB_SIZE)
    drafter.prefill(list(range(8)))
    assert (draft.model.kv_len, engine.num_passes) == (8, 3)  # passes of 3, 3 and 2
    drafter.prefill(list(range(8)))
    assert (draft.model.kv_len, engine.num_passes) == (8, 3)
    assert drafter.propose(list(range(20)), 2) == [20, 21]
    assert engine.num_passes == 3 + 4 + 1


@pytest.mark.parametrize("num_committed", range(1, 14))
@pytest.mark.parametrize("k", [0, 1, 2, 5])
def test_drafts_end_where_the_context_does(num_committed: int, k: int) -> None:
    """A context of 10, and no slot more: n tokens leave 10 - n slots, and the last token fed gives one more."""
    _, draft = draft_of(tight_spec(10))
    drafted = ModelDrafter(*draft, VOCAB_SIZE).propose(list(range(num_committed)), k)
    expected = min(k, 11 - num_committed) if num_committed <= 10 else 0
    assert drafted == list(range(num_committed, num_committed + expected))
    assert draft.model.kv_len <= 10


@pytest.mark.parametrize(
    ("target_vocab_size", "drafted"), [(20, []), (21, [20]), (23, [20, 21, 22]), (99, [20, 21, 22, 23])]
)
def test_a_token_the_target_does_not_know_ends_the_draft(target_vocab_size: int, drafted: list[int]) -> None:
    _, draft = draft_of(tight_spec(60))
    assert ModelDrafter(*draft, target_vocab_size).propose(list(range(20)), 4) == drafted


def test_a_token_the_draft_does_not_know_ends_drafting() -> None:
    """The target's vocabulary may be the larger one: such a token has no row in the draft's embedding."""
    engine, draft = draft_of(tight_spec(60, vocab_size=10))
    drafter = ModelDrafter(*draft, VOCAB_SIZE)
    assert drafter.propose([4, 5, 6], 2) == [7, 8]
    drafter.rollback(4)
    passes = engine.num_passes
    assert drafter.propose([4, 5, 6, 10], 2) == []
    drafter.rollback(5)
    drafter.prefill([4, 5, 6, 10, 7])
    assert drafter.propose([4, 5, 6, 10, 7], 2) == []
    assert engine.num_passes == passes


@pytest.mark.parametrize(("num_committed", "kv_len"), [(1, 0), (3, 2), (5, 4), (6, 5), (7, 6), (8, 7), (9, 7), (20, 7)])
def test_a_commit_keeps_what_was_fed_and_committed_but_the_newest(num_committed: int, kv_len: int) -> None:
    """Five tokens committed and three drafted: seven are fed."""
    _, draft = draft_of(tight_spec(60))
    drafter = ModelDrafter(*draft, VOCAB_SIZE)
    drafter.propose([0, 1, 2, 3, 4], 3)
    assert draft.model.kv_len == 7
    drafter.rollback(num_committed)
    assert draft.model.kv_len == kv_len
