"""The round on the fake engine: the output is the target's for any draft, and every count is exact.

The fake's next token is a hash of its cache, so a wrong position, a lost row or a bad rollback shows in the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrt.engines.contract import ModelSpec
from specrt.engines.fake import fake_spec
from specrt.runtime.drafting.drafters import Drafter, ModelDrafter, NGramDrafter
from specrt.runtime.model import KVCachedModel
from specrt.runtime.result import Stats
from specrt.runtime.round import generate_rounds
from tests.runtime.support.fakes import (
    ALL_K,
    POISON,
    PROMPT,
    Engine,
    Limits,
    Run,
    Script,
    Table,
    cache_of,
    continuation,
    engine_of,
    figures,
    limits_of,
    open_draft,
    open_target,
    plain,
    run,
)
from tests.runtime.support.tables import VOCAB_SIZE, hashed

# --- acceptance ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "wrong"), [(k, a) for k in ALL_K for a in range(k + 1)])
def test_exactly_the_tokens_before_the_wrong_one_are_accepted(k: int, wrong: int) -> None:
    """Five full rounds, each of ``wrong`` accepted tokens and the target's own."""
    next_token = hashed(1)
    tokens = continuation(next_token, 80)
    count = 1 + 5 * (wrong + 1)
    target = open_target(engine_of(next_token))
    stats, completion = Stats(), limits_of(k, 80).completion(PROMPT)
    rounds = generate_rounds(completion, target, Script(tokens, wrong))
    done = [next(rounds) for _ in range(6)]
    assert [len(step.emitted) for step in done] == [1] + 5 * [wrong + 1]
    assert [step.is_prefill for step in done] == [True] + 5 * [False]
    assert completion.tokens == tokens[: len(PROMPT) + count]
    for step in done:
        stats.add(step)
    assert figures(stats) == (5, 5 * k, 5 * wrong, 5, [0] * wrong + [5])
    assert stats.completion_tokens == count
    assert completion.finish_reason is None


@pytest.mark.parametrize(
    ("wrong", "expected", "calls"),
    [
        (0, (11, 34, 0, 11, [11]), [0, 4, 4, 4, 4, 4, 4, 4, 3, 2, 1]),
        (1, (6, 18, 5, 6, [1, 5]), [0, 4, 4, 4, 4, 2]),
        (2, (4, 13, 7, 4, [0, 1, 3]), [0, 4, 4, 4, 1]),
        (3, (3, 10, 8, 3, [0, 0, 1, 2]), [0, 4, 4, 2]),
        (4, (3, 8, 8, 3, [1, 0, 0, 0, 2]), [0, 4, 4]),
    ],
)
def test_the_figures_of_a_whole_generation(
    wrong: int, expected: tuple[int, int, int, int, list[int]], calls: list[int]
) -> None:
    """K = 4 and 12 new tokens: (rounds, drafted, accepted, own, histogram), and the k of each call to the drafter."""
    next_token = hashed(2)
    tokens = continuation(next_token, 12)
    script = Script(tokens, wrong)
    done = run(open_target(engine_of(next_token)), script, limits_of(4, 12))
    assert done.token_ids == tokens[len(PROMPT) :]
    assert figures(done.stats) == expected
    assert script.calls == calls
    assert script.commits == list(accumulate(map(len, done.rounds[1:]), initial=len(PROMPT) + 1))[1:]
    assert (done.stats.completion_tokens, done.finish_reason) == (12, "length")


@pytest.mark.parametrize(
    ("k", "histogram"),
    [
        (1, [0, 100]),
        (2, [0, 1, 66]),
        (3, [0, 0, 0, 50]),
        (4, [0, 0, 0, 0, 40]),
        (5, [0, 1, 0, 0, 0, 33]),
        (6, [0, 0, 0, 1, 0, 0, 28]),
        (7, [0, 0, 0, 0, 0, 0, 0, 25]),
        (8, [0, 1, 0, 0, 0, 0, 0, 0, 22]),
    ],
)
def test_a_model_that_drafts_for_itself_is_always_right(k: int, histogram: list[int]) -> None:
    """201 tokens. One pass for each drafted token; catching up takes no extra pass."""
    engine = engine_of(hashed(3))
    target, draft = open_target(engine), open_draft(engine)
    done = run(target, ModelDrafter(*draft, VOCAB_SIZE), limits_of(k, 201))
    assert done.token_ids == continuation(hashed(3), 201)[len(PROMPT) :]
    assert done.stats.acceptance_histogram == histogram
    assert done.stats.draft_acceptance_rate == 1.0
    assert done.stats.accepted + done.stats.own == 200
    assert engine.num_passes == 2 + done.stats.drafted + done.stats.rounds


@pytest.mark.parametrize("k", ALL_K)
@pytest.mark.parametrize("every", [2, 3])
def test_rounds_without_drafting_do_not_harm_later_drafts(k: int, every: int) -> None:
    engine = engine_of(hashed(4))

    class Sometimes(ModelDrafter):
        calls = 0

        def propose(self, committed: Sequence[int], k: int) -> list[int]:
            self.calls += 1
            return super().propose(committed, k) if self.calls % every == 0 else []

    done = run(open_target(engine), Sometimes(*open_draft(engine), VOCAB_SIZE), limits_of(k, 210))
    assert done.token_ids == continuation(hashed(4), 210)[len(PROMPT) :]
    assert done.stats.drafted > 40
    assert done.stats.draft_acceptance_rate == 1.0


@pytest.mark.parametrize("k", ALL_K)
def test_a_drafter_that_is_always_wrong_costs_only_time(k: int) -> None:
    tokens = continuation(hashed(5), 40)
    done = run(open_target(engine_of(hashed(5))), Script(tokens, 0), limits_of(k, 40))
    assert done.token_ids == tokens[len(PROMPT) :]
    assert done.stats.draft_acceptance_rate == 0.0
    assert done.stats.acceptance_histogram == [39]


def test_a_draft_of_k_tokens_takes_one_pass_of_the_target() -> None:
    """Widths 1 + K on a full cache, one token at the end, and the prompt in one pass."""
    engine = engine_of(hashed(6))
    tokens = continuation(hashed(6), 12)
    run(open_target(engine), Script(tokens, 4), limits_of(4, 12))
    assert engine.widths == [5, 5, 5, 1]


def test_drafts_shorter_than_k_are_verified_as_they_are() -> None:
    tokens = continuation(hashed(6), 14)
    lengths = iter([3, 0, 1, 0, 2, 0])

    class Short(Script):
        def propose(self, committed: Sequence[int], k: int) -> list[int]:
            return super().propose(committed, min(k, next(lengths)))

    done = run(open_target(engine_of(hashed(6))), Short(tokens, 9), limits_of(4, 11))
    assert done.token_ids == tokens[len(PROMPT) :][:11]
    assert figures(done.stats) == (5, 5, 5, 5, [2, 2, 0, 1])


# --- every case at once --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A generation: the target's table and spec, the prompt, the limits, and where drafts come from."""

    seed: int
    memory: int
    spec: ModelSpec
    prompt: list[int]
    limits: Limits
    kind: str
    draft_spec: ModelSpec

    @property
    def table(self) -> Table:
        return hashed(self.seed, self.spec.vocab_size, self.memory)

    def draft_table(self) -> Table:
        """The target's, another one, or one that is right two times in three; within the draft's vocabulary."""
        size, other = self.draft_spec.vocab_size, hashed(self.seed + 1, self.draft_spec.vocab_size, self.memory)

        def next_token(prefix: Sequence[int]) -> int:
            is_own = self.kind == "other" or (self.kind == "half" and hashed(self.seed + 2)(prefix) % 3 == 0)
            return other(prefix) if is_own else self.table(prefix) % size

        return next_token


@st.composite
def cases(draw: st.DrawFn) -> Case:
    k, vocab_size = draw(st.integers(1, 8)), draw(st.integers(2, 12))
    spec = fake_spec(vocab_size, draw(st.integers(2, 48)), k)
    spec = replace(spec, max_width=k + draw(st.integers(1, 12)))
    draft_spec = fake_spec(max(1, vocab_size + draw(st.integers(-2, 3))), draw(st.integers(1, 60)), k)
    draft_spec = replace(draft_spec, max_width=draw(st.integers(1, 12)))
    prompt = draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=30))
    eos = draw(st.frozensets(st.integers(0, vocab_size - 1), max_size=2))
    limits = Limits(eos, draw(st.integers(0, 40)), spec.max_seq_len, k)
    kind = draw(st.sampled_from(["none", "self", "half", "other", "ngram"]))
    return Case(draw(st.integers(0, 999)), draw(st.integers(0, 3)), spec, prompt, limits, kind, draft_spec)


def check_caches(tokens: list[int], model: KVCachedModel, is_target: bool) -> None:
    """The cache holds the committed tokens but the newest (a draft's: at most those); what is stale gets poisoned."""
    assert model.kv_len == len(tokens) - 1 if is_target else model.kv_len <= len(tokens) - 1
    cache = cache_of(model)
    assert cache[: model.kv_len].tolist() == tokens[: model.kv_len]
    cache[model.kv_len :] = POISON


def check_figures(done: Run, case: Case) -> None:
    """The identities between the counts, and the counts that the emitted pieces imply."""
    stats = done.stats
    assert stats.completion_tokens == len(done.token_ids) == bool(done.token_ids) + stats.accepted + stats.own
    assert stats.rounds == len(done.rounds[1:]) == sum(stats.acceptance_histogram)
    assert stats.accepted == sum(n * count for n, count in enumerate(stats.acceptance_histogram)) <= stats.drafted
    assert stats.drafted <= case.limits.k * stats.rounds
    assert len(stats.acceptance_histogram) <= case.limits.k + 1
    assert stats.rounds - 1 <= stats.own <= stats.rounds or stats.rounds == 0
    assert all(1 <= len(emitted) <= case.limits.k + 1 for emitted in done.rounds)
    if case.kind == "none":
        assert (stats.drafted, stats.own) == (0, stats.rounds)


@settings(max_examples=300)
@given(cases())
def test_the_output_is_plain_and_the_caches_hold_what_is_committed(case: Case) -> None:
    engine, draft_engine = Engine(case.spec, case.table), Engine(case.draft_spec, case.draft_table())
    target, draft = open_target(engine), open_draft(draft_engine)
    drafter: Drafter | None = ModelDrafter(*draft, case.spec.vocab_size)
    if case.kind in ("none", "ngram"):
        drafter = NGramDrafter() if case.kind == "ngram" else None

    def between(tokens: list[int]) -> None:
        check_caches(tokens, target.model, True)
        check_caches(tokens, draft.model, False)

    done = run(target, drafter, case.limits, case.prompt, between)
    assert (done.token_ids, done.finish_reason) == plain(case.table, case.prompt, case.limits)
    check_figures(done, case)


def test_n_gram_drafts_continue_a_cycle() -> None:
    """A table that remembers one token runs into a cycle, which the drafter must find: nearly all is accepted then."""
    next_token = hashed(14, vocab_size=8, memory=1)
    done = run(open_target(engine_of(next_token)), NGramDrafter(), limits_of(5, 121))
    assert done.token_ids == plain(next_token, PROMPT, limits_of(5, 121))[0]
    assert done.stats.rounds <= 30


# --- interrupted ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rounds", [0, 1, 2, 3])
def test_a_drafter_that_raises_leaves_a_cache_that_can_be_used_again(num_rounds: int) -> None:
    tokens = continuation(hashed(16), 30)

    class Failing(Script):
        def prefill(self, committed: Sequence[int]) -> None:
            self.propose(committed, 0)

        def propose(self, committed: Sequence[int], k: int) -> list[int]:
            if len(self.calls) == num_rounds:
                raise OSError("no draft today")
            return super().propose(committed, k)

    target = open_target(engine_of(hashed(16)))
    with pytest.raises(OSError, match="no draft today"):
        run(target, Failing(tokens, 2), limits_of(4, 30))
    target.model.rollback(0)
    assert run(target, Script(tokens, 2), limits_of(4, 30)).token_ids == tokens[len(PROMPT) :]


def test_a_generator_that_is_closed_leaves_caches_that_can_be_used_again() -> None:
    tokens = continuation(hashed(17), 30)
    engine = engine_of(hashed(17))
    target, draft = open_target(engine), open_draft(engine)
    completion = limits_of(4, 30).completion(PROMPT)
    rounds = generate_rounds(completion, target, ModelDrafter(*draft, VOCAB_SIZE))
    assert [next(rounds).emitted, next(rounds).emitted] == [tokens[5:6], tokens[6:11]]
    rounds.close()  # type: ignore[attr-defined]
    target.model.rollback(0)
    draft.model.rollback(0)
    done = run(target, ModelDrafter(*draft, VOCAB_SIZE), limits_of(4, 30))
    assert done.token_ids == tokens[len(PROMPT) :]
    assert done.stats.draft_acceptance_rate == 1.0
