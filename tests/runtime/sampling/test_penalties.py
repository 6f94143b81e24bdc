"""Counts that follow the tokens, and Python processors: the same output as plain, and no prefix that they forbade."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from specrt.engines import samplers
from specrt.engines.errors import UsageError
from specrt.engines.interface import Array
from specrt.runtime.options import LogitsProcessor
from specrt.runtime.runtime import Runtime
from specrt.runtime.sampling.penalties import Penalties
from specrt.runtime.settings import Settings
from tests.runtime.support.bundles import Backend, Open
from tests.runtime.support.fakes import ALL_K, PROMPT, Script, engine_of, pair_of, slot_of
from tests.runtime.support.plain import decode, penalized
from tests.runtime.support.tables import hashed_logits, noisy

VOCAB_SIZE = 32
TABLE = hashed_logits(1, VOCAB_SIZE)
DRAFT = noisy(TABLE, 2, VOCAB_SIZE, 0.125)
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.5, "frequency_penalty": 0.25, "banned_token_ids": (4,)}

# --- counts --------------------------------------------------------------------------------------------------------

Ids = st.lists(st.integers(0, 9), max_size=5)


@hypothesis_settings(max_examples=150)
@given(st.lists(st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=5), Ids, Ids, Ids), max_size=3))
def test_counts_are_those_of_what_is_committed_and_ahead(
    generations: list[tuple[list[int], list[int], list[int], list[int]]],
) -> None:
    """Each step of a draft, of which some ids are then committed and others instead; ids of the target's alone (8, 9).

    One generation after another on the same memory.
    """
    size = 8
    slot_samplers = slot_of(engine_of(TABLE, vocab_size=size), max_rows=1).samplers
    for prompt, *rounds in generations:
        penalties = Penalties(slot_samplers, Settings(min_new_tokens=7, ending_ids=(1, 9)), len(prompt))
        host = slot_samplers.sampler(samplers.PENALTIES).host
        committed = list(prompt)
        for drafted in rounds:
            for step in range(len(drafted) + 1):
                penalties.run(1, 1, committed, drafted[:step])
                tokens = [*committed, *drafted[:step]]
                in_context, in_output = (
                    np.bincount(ids, minlength=10)[:size] for ids in (tokens, tokens[len(prompt) :])
                )
                assert host[samplers.CONTEXT_COUNTS].tolist() == in_context.tolist()
                assert host[samplers.OUTPUT_COUNTS].tolist() == in_output.tolist()
                assert host[samplers.NUM_UNENDING_ROWS].tolist() == [max(0, 7 - (len(tokens) - len(prompt)))]
            committed += [*drafted[: len(drafted) // 2], 3]


def test_a_generation_starts_from_what_its_settings_say() -> None:
    slot_samplers = slot_of(engine_of(TABLE, vocab_size=8)).samplers
    first = Settings(
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={1: 2.0, 9: 1.0},
        banned_token_ids=(2, 9),
        min_new_tokens=3,
        ending_ids=(3, 9),
    )
    Penalties(slot_samplers, first, 1).run(1, 1, [5, 5, 6], ())
    host = slot_samplers.sampler(samplers.PENALTIES).host
    shown = {name: host[name].tolist() for name in host if name not in ("logits", "processed_logits")}
    nothing = -np.inf
    assert shown[samplers.LOGIT_BIAS] == [0, 2, nothing, 0, 0, 0, 0, 0]
    assert shown[samplers.ENDING_LIMIT] == [np.inf, np.inf, np.inf, nothing, *[np.inf] * 4]
    assert shown[samplers.CONTEXT_COUNTS] == [0, 0, 0, 0, 0, 2, 1, 0]
    assert shown[samplers.OUTPUT_COUNTS] == [0, 0, 0, 0, 0, 1, 1, 0]
    assert [shown[n] for n in (samplers.REPETITION_PENALTY, samplers.PRESENCE_PENALTY, samplers.FREQUENCY_PENALTY)] == [
        [2.0],
        [0.5],
        [0.25],
    ]
    Penalties(slot_samplers, Settings(), 1)
    for name in (samplers.LOGIT_BIAS, samplers.CONTEXT_COUNTS, samplers.OUTPUT_COUNTS):
        assert host[name].tolist() == [0] * 8
    assert host[samplers.ENDING_LIMIT].tolist() == [np.inf] * 8
    assert host[samplers.REPETITION_PENALTY].tolist() == [1.0]


# --- processors ----------------------------------------------------------------------------------------------------


class Watched:
    """A grammar: after an odd id an even one, after id 8 one below 8. Raises for a prefix that it forbids."""

    def __init__(self, num_prompt_tokens: int, vocab_size: int = VOCAB_SIZE) -> None:
        self._start, self._size = num_prompt_tokens, vocab_size
        self.prefixes: list[list[int]] = []
        self._allowed: dict[tuple[int, ...], list[bool]] = {}

    def __call__(self, prefix: Sequence[int], logits: Array) -> Array | None:
        self.prefixes.append(list(prefix))
        before = tuple(prefix[:-1])
        assert len(prefix) >= self._start
        assert len(prefix) == self._start or self._allowed[before][prefix[-1]], f"forbidden prefix {prefix}"
        ids = np.arange(len(logits))
        allowed = (ids % 2 == 0) if prefix[-1] % 2 else (ids < 8) if prefix[-1] == 8 else ids >= 0
        self._allowed[tuple(prefix)] = allowed.tolist()
        if prefix[-1] % 2:
            logits[~allowed] = -np.inf  # in place, and nothing returned
            return None
        return np.where(allowed, logits, -np.inf)


@pytest.mark.parametrize("temperature", [0, 0.7, 1.0])
@pytest.mark.parametrize("penalties", [{}, PENALTIES], ids=["alone", "penalized"])
@pytest.mark.parametrize("kind", ["ngram", "model", "script"])
def test_a_grammar_gives_plain_s_output_and_sees_only_what_it_allowed(
    temperature: float, penalties: dict[str, Any], kind: str
) -> None:
    """Scripts propose ids that the grammar forbids, at each place of a round."""
    plain = Settings(temperature=temperature, seed=3, max_new_tokens=24, **penalties)
    expected = decode(TABLE, replace(plain, logits_processors=(Watched(len(PROMPT)),)), PROMPT)
    assert all(b % 2 == 0 for a, b in pairwise(expected) if a % 2)
    pair = pair_of(TABLE, DRAFT, VOCAB_SIZE)
    for k in ALL_K:
        for wrong in range(k + 1) if kind == "script" else [0]:
            watched = Watched(len(PROMPT))
            settings = replace(plain, num_speculative_tokens=k, draft=kind, logits_processors=(watched,))
            script = Script([*PROMPT, *expected], wrong)
            done = pair.run(settings, drafter=script if kind == "script" else None)
            assert done.token_ids == expected
            assert [*PROMPT, *expected[:-1]] in watched.prefixes


def test_a_grammar_holds_for_what_is_drawn() -> None:
    pair = pair_of(TABLE, DRAFT, VOCAB_SIZE)
    settings = Settings(
        temperature=1.0, rule="block", draft="model", num_speculative_tokens=5, max_new_tokens=60, **PENALTIES
    )
    for seed in range(5):
        watched = Watched(len(PROMPT))
        done = pair.run(replace(settings, seed=seed, logits_processors=(watched,)))
        tokens = [PROMPT[-1], *done.token_ids]
        assert all(b % 2 == 0 for a, b in pairwise(tokens) if a % 2)
        assert 4 not in done.token_ids


@pytest.mark.parametrize("penalties", [{}, {"repetition_penalty": 1.5, "presence_penalty": 0.5}], ids=["alone", "all"])
def test_processors_run_in_turn_on_penalized_logits(penalties: dict[str, Any]) -> None:
    seen: list[tuple[list[int], Array]] = []

    def first(prefix: Sequence[int], logits: Array) -> None:
        seen.append((list(prefix), logits.copy()))
        logits += 1000  # float32 keeps 1/32 of it

    def second(prefix: Sequence[int], logits: Array) -> list[float]:
        assert np.array_equal(logits, seen[-1][1] + np.float32(1000))
        return [-float(value) for value in logits]

    settings = Settings(max_new_tokens=12, num_speculative_tokens=3, **penalties)
    turned: list[int] = []
    done = pair_of(TABLE, DRAFT, VOCAB_SIZE).run(
        replace(settings, draft="model", logits_processors=(first, second))  # type: ignore[arg-type]
    )
    for prefix, logits in seen:
        rows = [penalized(table(prefix), settings, prefix, len(PROMPT)) for table in (TABLE, DRAFT)]
        assert any(np.allclose(logits, row, atol=1e-5) for row in rows)
    for _ in range(12):
        tokens = [*PROMPT, *turned]
        row = penalized(TABLE(tokens), settings, tokens, len(PROMPT)).astype(np.float32)
        turned.append(int(np.argmin(row + np.float32(1000))))
    assert done.token_ids == turned


# --- processors that go wrong --------------------------------------------------------------------------------------


def nothing_after(length: int) -> LogitsProcessor:
    def processor(prefix: Sequence[int], logits: Array) -> None:
        if len(prefix) >= length:
            logits[:] = -np.inf

    return processor


def wrong_shape(prefix: Sequence[int], logits: Array) -> Array | None:
    return logits[:-1] if len(prefix) >= 9 else None


def not_a_number(prefix: Sequence[int], logits: Array) -> None:
    logits[3] = np.nan


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (nothing_after(5), "logits_processors: no id is left after 5 tokens; they must allow"),
        (nothing_after(9), "logits_processors: no id is left after 9 tokens; they must allow"),
        (not_a_number, "logits_processors: no id is left after 5 tokens; they must allow"),
        (wrong_shape, f"logits_processors: {wrong_shape!r} returned shape (63,), expected (64,)"),
        (lambda prefix, logits: np.float32(0), "logits_processors: <function <lambda>"),
    ],
    ids=["nothing after 5", "nothing after 9", "not a number", "wrong shape", "a scalar"],
)
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "rule": "block"}])
@pytest.mark.parametrize("draft", ["none", "model"])
def test_a_processor_that_goes_wrong_is_named_and_the_slot_is_as_good_as_new(
    open_bundle: Open, backend: Backend, processor: LogitsProcessor, message: str, options: dict[str, Any], draft: str
) -> None:
    backend.target = hashed_logits(1, 64)
    backend.draft = noisy(backend.target, 2, 64)
    runtime = open_bundle()
    expected = runtime.generate([5] * 5, max_new_tokens=12).token_ids
    with pytest.raises(UsageError) as caught:
        runtime.generate([3, 1, 4, 1, 5], logits_processors=[processor], draft=draft, **options)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value).splitlines()) == 1
    assert runtime.generate([5] * 5, max_new_tokens=12).token_ids == expected
    assert [engine.num_open for engine in backend.engines.values()] == [1, 1]


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("kind", ["script", "model"])
def test_a_dead_end_that_the_target_does_not_take_stops_nothing(temperature: float, kind: str) -> None:
    """A processor that leaves nothing after one id, which is drafted but never the target's own."""
    plain = Settings(temperature=temperature, seed=3, max_new_tokens=12)
    expected = decode(TABLE, plain, PROMPT)
    dead = next(token for token in range(VOCAB_SIZE) if token not in expected and token not in PROMPT)

    def processor(prefix: Sequence[int], logits: Array) -> None:
        if prefix[-1] == dead:
            logits[:] = -np.inf

    likes_it = lambda prefix: DRAFT(prefix) + 20 * (np.arange(VOCAB_SIZE) == dead).astype(np.float32)  # noqa: E731
    settings = replace(plain, num_speculative_tokens=3, draft=kind, logits_processors=(processor,))
    script = Script([*PROMPT, *expected], 1, bad=dead)
    done = pair_of(TABLE, likes_it, VOCAB_SIZE).run(settings, drafter=script if kind == "script" else None)
    assert done.token_ids == expected


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 1}])
@pytest.mark.parametrize("draft_vocab_size", [60, 68])
def test_a_processor_made_for_the_target_s_vocabulary_may_be_used_with_any_draft(
    open_bundle: Open, backend: Backend, options: dict[str, Any], draft_vocab_size: int
) -> None:
    """A mask of 64 ids; the draft's logits are fewer or more."""
    backend.vocab_sizes = {"target": 64, "draft": draft_vocab_size}
    backend.target = hashed_logits(1, 64)
    backend.draft = noisy(hashed_logits(1, 64), 2, draft_vocab_size, 0.125)
    mask = np.where(np.arange(64) % 3 == 0, -np.inf, 0).astype(np.float32)
    options = {"max_new_tokens": 12, "logits_processors": [lambda prefix, logits: logits + mask], **options}
    runtime = open_bundle()
    plain = runtime.generate([1, 2], draft="none", **options).token_ids
    assert runtime.generate([1, 2], **options).token_ids == plain


@pytest.mark.parametrize("draft", ["none", "model"])
def test_a_processor_does_not_lift_a_ban(runtime: Runtime, draft: str) -> None:
    def prefers_5(prefix: Sequence[int], logits: Array) -> None:
        logits[5] = 1000

    options: dict[str, Any] = {"max_new_tokens": 8, "draft": draft, "logits_processors": [prefers_5]}
    assert runtime.generate([1, 2], **options).token_ids == [5] * 8
    assert 5 not in runtime.generate([1, 2], **options, banned_token_ids=[5]).token_ids


ALL_IDS: list[dict[str, Any]] = [
    {"banned_token_ids": range(64)},
    {"stop_token_ids": range(64), "min_new_tokens": 2},
]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "rule": "block"}])
@pytest.mark.parametrize("options", ALL_IDS, ids=["bans", "min_new_tokens"])
def test_options_that_leave_no_id_are_refused(
    runtime: Runtime, options: dict[str, Any], sampling: dict[str, Any]
) -> None:
    """Rather than give an id that is banned, or end the text too early."""
    with pytest.raises(UsageError):
        runtime.generate([1, 2], max_new_tokens=3, **options, **sampling)
