"""Log-probabilities: one entry for each emitted id, from the target's own logits where it stands, however it came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specrt.engines.interface import Array
from specrt.runtime.result import Result
from specrt.runtime.runtime import Runtime
from specrt.runtime.sampling.logprobs import TokenLogprobs
from tests.runtime.support.bundles import PROMPT, VOCAB_SIZE, Backend, Open
from tests.runtime.support.tables import hashed_logits, noisy

K = 8
TABLE = hashed_logits(1, VOCAB_SIZE)
DRAFT = noisy(TABLE, 2, VOCAB_SIZE, 0.125)
CHANGES: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.0, "seed": 3, "rule": "block"},
    {"temperature": 1.0, "seed": 3, "rule": "block", "reproducible": True},
    {"temperature": 0.7, "seed": 3, "top_k": 9, "repetition_penalty": 1.5, "logit_bias": {3: 2.0}},
    {"temperature": 0.7, "seed": 3, "logits_processors": [lambda prefix, logits: logits * 2]},
]
each_change = pytest.mark.parametrize("changes", CHANGES, ids=range(len(CHANGES)))


@pytest.fixture
def runtime(open_bundle: Open, backend: Backend) -> Runtime:
    backend.target, backend.draft, backend.k = TABLE, DRAFT, K
    return open_bundle()


def log_softmax(prefix: Sequence[int]) -> Array:
    """Of the target's raw logits after ``prefix``. [V] f64"""
    logits = TABLE(prefix).astype(np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())  # type: ignore[no-any-return]


def check(result: Result, num_top: int, prompt: Sequence[int] = PROMPT) -> None:
    """Each entry against the definition; ties among the most likely go to the first id."""
    assert result.logprobs is not None
    assert [entry.token_id for entry in result.logprobs] == result.token_ids
    for index, entry in enumerate(result.logprobs):
        expected = log_softmax([*prompt, *result.token_ids[:index]])
        assert entry.logprob == pytest.approx(expected[entry.token_id], abs=1e-5)
        most_likely = np.argsort(-expected, kind="stable")[:num_top].tolist()
        assert [token for token, _ in entry.top] == most_likely
        assert [value for _, value in entry.top] == pytest.approx(expected[most_likely].tolist(), abs=1e-5)


@each_change
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_every_k_gives_each_token_its_own(runtime: Runtime, changes: dict[str, Any], num_top: int) -> None:
    for k in range(K + 1):
        result = runtime.generate(PROMPT, max_new_tokens=25, num_speculative_tokens=k, logprobs=num_top, **changes)
        assert len(result.token_ids) == 25
        check(result, num_top)


@each_change
def test_no_logprobs_are_given_unless_requested(runtime: Runtime, changes: dict[str, Any]) -> None:
    assert runtime.generate(PROMPT, max_new_tokens=5, **changes).logprobs is None
    assert runtime.generate(PROMPT, max_new_tokens=0, logprobs=2, **changes).logprobs == []


def test_asking_changes_no_token(runtime: Runtime) -> None:
    for changes in CHANGES:
        changes = {"num_speculative_tokens": K, **changes}
        asked, silent = (runtime.generate(PROMPT, max_new_tokens=25, logprobs=n, **changes) for n in (3, None))
        assert asked.token_ids == silent.token_ids
        assert asked.stats.acceptance_histogram == silent.stats.acceptance_histogram


@pytest.mark.parametrize("k", range(K + 1))
@pytest.mark.parametrize("changes", CHANGES[:2], ids=["greedy", "sampled"])
def test_a_text_cut_in_the_middle_of_a_round_is_cut_here_too(runtime: Runtime, changes: dict[str, Any], k: int) -> None:
    """By a stop id, a stop string or the length, at each of twelve places: the uncut one's beginning."""
    options = {**changes, "logprobs": 2, "num_speculative_tokens": k, "reproducible": True}
    whole = runtime.generate(PROMPT, max_new_tokens=20, **options)
    assert whole.logprobs is not None
    for place in range(12):
        token = whole.token_ids[place]
        first = whole.token_ids.index(token) + 1
        by_length = runtime.generate(PROMPT, max_new_tokens=place, **options)
        assert by_length.logprobs == whole.logprobs[:place]
        by_id = runtime.generate(PROMPT, max_new_tokens=20, stop_token_ids=[token], **options)
        assert (by_id.logprobs, by_id.stop) == (whole.logprobs[:first], token)
        by_string = runtime.generate(PROMPT, max_new_tokens=20, stop=f" w{token} ", **options)
        # The word after it says that it has ended.
        words = [entry.token_id for entry in by_string.logprobs or []]
        assert words == by_string.token_ids == whole.token_ids[: len(words)]
        assert by_string.logprobs == whole.logprobs[: len(words)]


def test_a_draft_that_is_the_target_gives_the_same(open_bundle: Open, backend: Backend) -> None:
    """Accepted to the last, so that nearly all entries are of rows that verified a drafted id."""
    backend.target, backend.k = TABLE, K
    runtime = open_bundle("self")
    result = runtime.generate(PROMPT, max_new_tokens=30, logprobs=3, num_speculative_tokens=K)
    assert result.stats.draft_acceptance_rate == 1.0
    check(result, 3)
    assert result.logprobs == runtime.generate(PROMPT, max_new_tokens=30, logprobs=3, draft="none").logprobs


def test_a_small_vocabulary_has_no_more_than_it_has(open_bundle: Open, backend: Backend) -> None:
    backend.vocab_sizes = dict.fromkeys(("target", "draft"), 7)
    backend.target = backend.draft = hashed_logits(1, 7)
    result = open_bundle().generate([3], max_new_tokens=3, logprobs=20)
    assert [len(entry.top) for entry in result.logprobs or []] == [7] * 3


def test_an_entry_is_plain_data(runtime: Runtime) -> None:
    (entry,) = runtime.generate(PROMPT, max_new_tokens=1, logprobs=1).logprobs or []
    assert isinstance(entry, TokenLogprobs)
    assert [type(value) for value in (entry.token_id, entry.logprob, *entry.top[0])] == [int, float, int, float]
