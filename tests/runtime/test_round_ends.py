"""Where a round ends the text: the requested tokens, the contexts, ids that only a draft has, and EOS."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specrt.runtime.drafting.drafters import ModelDrafter
from tests.runtime.support.fakes import (
    ALL_K,
    PROMPT,
    Script,
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

# --- where it ends -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_new_tokens", "calls"),
    [
        (0, []),
        (1, []),
        (2, []),  # the prefill gives one, the target the other
        (3, [0, 1]),
        (4, [0, 2]),
        (5, [0, 3]),
        (6, [0, 3]),
        (7, [0, 3, 1]),
        (8, [0, 3, 2]),
        (9, [0, 3, 3]),
        (10, [0, 3, 3]),
    ],
)
def test_what_is_left_bounds_the_draft_and_one_token_needs_none(max_new_tokens: int, calls: list[int]) -> None:
    """K = 3, everything accepted: the k of each call to the drafter, 0 being the prefill."""
    tokens = continuation(hashed(7), 10)
    script = Script(tokens, 9)
    done = run(open_target(engine_of(hashed(7))), script, limits_of(3, max_new_tokens))
    assert script.calls == calls
    assert done.token_ids == tokens[len(PROMPT) :][:max_new_tokens]
    assert done.finish_reason == "length"


@pytest.mark.parametrize("k", ALL_K)
@pytest.mark.parametrize("wrong", [0, 1, 9])
def test_max_new_tokens_is_exact(k: int, wrong: int) -> None:
    tokens = continuation(hashed(8), 24)
    for max_new_tokens in range(24):
        done = run(open_target(engine_of(hashed(8))), Script(tokens, wrong), limits_of(k, max_new_tokens))
        assert done.token_ids == tokens[len(PROMPT) :][:max_new_tokens]
        assert done.stats.completion_tokens == max_new_tokens
        assert done.finish_reason == "length"


def test_no_new_tokens_means_no_pass() -> None:
    engine = engine_of(hashed(8))
    done = run(open_target(engine), None, limits_of(4, 0))
    assert (done.rounds, engine.num_passes) == ([], 0)
    assert (done.stats.completion_tokens, figures(done.stats)) == (0, (0, 0, 0, 0, []))


@pytest.mark.parametrize("k", ALL_K)
def test_the_context_is_used_to_its_last_slot(k: int) -> None:
    """Every prompt length up to the context of 24 and one beyond, with drafts that are right and ones that are not."""
    next_token = hashed(9)
    everything = continuation(next_token, 30, prompt=[1])
    for length in range(1, 26):
        for wrong in (0, 9):
            engine = engine_of(next_token, max_seq_len=24)
            script = Script(everything, wrong)
            done = run(open_target(engine), script, limits_of(k, 99, max_seq_len=24), everything[:length])
            assert done.token_ids == everything[length:24]
            assert done.finish_reason == "length"


@pytest.mark.parametrize(
    ("context", "drafted"),
    [
        (1, [0, 0, 0]),
        (4, [0, 0, 0]),
        (5, [0, 0, 0]),  # holds the prompt, and is full
        (6, [1, 1, 1]),
        (13, [4, 6, 8]),
        (20, [8, 12, 8 + 6]),
        (29, [12, 18, 8 + 8 + 5]),
        (31, [12, 18, 8 + 8 + 5]),
    ],
)
@pytest.mark.parametrize("k", [1, 3, 8])
def test_drafts_end_with_the_draft_s_own_context(k: int, context: int, drafted: list[int]) -> None:
    """The draft has the target's table and another context, for the target's 30 and a prompt of 5; K = 1, 3, 8.

    It drafts to its last slot, then not at all. Only a prompt that it can hold is fed to it.
    """
    next_token = hashed(10)
    target, draft = engine_of(next_token, max_seq_len=30), engine_of(next_token, max_seq_len=context)
    drafter = ModelDrafter(*open_draft(draft), VOCAB_SIZE)
    done = run(open_target(target), drafter, limits_of(k, 99, max_seq_len=30))
    assert done.token_ids == continuation(next_token, 25)[len(PROMPT) :]
    assert done.stats.drafted == done.stats.accepted == drafted[[1, 3, 8].index(k)]
    assert draft.num_passes == done.stats.drafted + (context >= len(PROMPT))


@pytest.mark.parametrize("surplus", [1, 2000])
def test_ids_that_only_the_draft_knows_never_reach_the_target(surplus: int) -> None:
    """The engine of these tests refuses ids outside its vocabulary."""
    vocab_size = 8
    draft_table = hashed(11, vocab_size + surplus)
    draft = engine_of(draft_table, vocab_size=vocab_size + surplus)
    unknown = 0

    def watched(prefix: Sequence[int]) -> int:
        nonlocal unknown
        unknown += draft_table(prefix) >= vocab_size
        return draft_table(prefix)

    draft.next_token = watched
    target = engine_of(hashed(12, vocab_size), vocab_size=vocab_size)
    drafter = ModelDrafter(*open_draft(draft), vocab_size)
    done = run(open_target(target), drafter, limits_of(4, 60), [1, 2, 3])
    assert done.token_ids == plain(hashed(12, vocab_size), [1, 2, 3], limits_of(4, 60))[0]
    assert unknown > 0


# --- EOS -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (0, (0, 0, 0, 0, [])),  # the prefill's token
        (1, (1, 4, 1, 0, [0, 1])),  # the first drafted token
        (2, (1, 4, 2, 0, [0, 0, 1])),
        (3, (1, 4, 3, 0, [0, 0, 0, 1])),
        (4, (1, 4, 4, 0, [0, 0, 0, 0, 1])),  # the last drafted token: what the target adds is cut
        (5, (1, 4, 4, 1, [0, 0, 0, 0, 1])),  # the target's own
        (6, (2, 8, 5, 1, [0, 1, 0, 0, 1])),
        (9, (2, 8, 8, 1, [0, 0, 0, 0, 2])),
        (10, (2, 8, 8, 2, [0, 0, 0, 0, 2])),
    ],
)
def test_eos_cuts_at_its_place(place: int, expected: tuple[int, int, int, int, list[int]]) -> None:
    """K = 4, everything accepted, self-drafted: tokens after the first EOS are neither emitted, counted nor cached."""
    next_token = hashed(13)
    tokens = continuation(next_token, 40)
    new = tokens[len(PROMPT) :]
    engine = engine_of(next_token)
    target, draft = open_target(engine), open_draft(engine)
    done = run(target, ModelDrafter(*draft, VOCAB_SIZE), limits_of(4, 40, eos=[new[place], new[place + 2], 1]))
    assert done.token_ids == new[: place + 1]
    assert done.finish_reason == "stop"
    assert done.stats.completion_tokens == place + 1
    assert figures(done.stats) == expected
    num_committed = len(PROMPT) + place + 1
    assert target.model.kv_len == num_committed - 1
    assert draft.model.kv_len <= num_committed - 1
    assert cache_of(target.model)[: target.model.kv_len].tolist() == tokens[: num_committed - 1]


@pytest.mark.parametrize("wrong", range(5))
def test_eos_as_the_target_s_own_token_after_a_rejected_draft(wrong: int) -> None:
    tokens = continuation(hashed(13), 40)
    eos = tokens[len(PROMPT) + 1 + wrong]
    done = run(open_target(engine_of(hashed(13))), Script(tokens, wrong), limits_of(4, 40, eos=[eos]))
    assert done.token_ids == tokens[len(PROMPT) :][: wrong + 2]
    assert done.finish_reason == "stop"
    assert figures(done.stats) == (1, 4, wrong, 1, [0] * wrong + [1])


@pytest.mark.parametrize("wrong", range(4))
def test_a_rejected_eos_does_not_stop(wrong: int) -> None:
    tokens = continuation(hashed(13), 30)
    eos = next(token for token in range(VOCAB_SIZE) if token not in tokens)
    done = run(open_target(engine_of(hashed(13))), Script(tokens, wrong, bad=eos), limits_of(4, 30, eos=[eos]))
    assert done.token_ids == tokens[len(PROMPT) :]
    assert done.finish_reason == "length"


def test_eos_in_the_prompt_does_not_stop_and_eos_as_the_last_token_gives_stop() -> None:
    tokens = continuation(hashed(13), 6)
    eos = [*PROMPT, tokens[-1]]
    done = run(open_target(engine_of(hashed(13))), Script(tokens, 9), limits_of(8, 6, eos=eos))
    assert done.token_ids == tokens[len(PROMPT) :]
    assert done.finish_reason == "stop"
