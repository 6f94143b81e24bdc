"""The figures of a generation on cases small enough to check by hand, and the keys of ``--json``."""

from __future__ import annotations

import json

import pytest

from specrt.runtime.result import Result, Stats
from specrt.runtime.round import Round
from specrt.runtime.sampling.logprobs import TokenLogprobs
from specrt.runtime.settings import Settings


def counted(*rounds: tuple[int, int, int]) -> Stats:
    """Stats after rounds of (drafted, accepted, emitted)."""
    stats = Stats()
    for num_drafted, num_accepted, num_emitted in rounds:
        stats.add(Round([1] * num_emitted, [1] * num_drafted, num_accepted))
    return stats


@pytest.mark.parametrize(
    ("rounds", "drafted", "accepted", "own", "histogram"),
    [
        ([], 0, 0, 0, []),
        ([(0, 0, 1)], 0, 0, 1, [1]),
        ([(4, 0, 1)], 4, 0, 1, [1]),
        ([(4, 4, 5)], 4, 4, 1, [0, 0, 0, 0, 1]),
        ([(4, 2, 3), (4, 0, 1), (3, 2, 3)], 11, 4, 3, [1, 0, 2]),
        ([(4, 2, 2)], 4, 2, 0, [0, 0, 1]),  # a stop cut the third accepted token and the target's own
        ([(4, 3, 3)], 4, 3, 0, [0, 0, 0, 1]),  # and here only the target's own
        ([(4, 0, 1), (4, 1, 1)], 8, 1, 1, [1, 1]),
    ],
)
def test_a_round_is_counted_by_what_it_emitted(
    rounds: list[tuple[int, int, int]], drafted: int, accepted: int, own: int, histogram: list[int]
) -> None:
    stats = counted(*rounds)
    assert stats.rounds == len(rounds)
    assert (stats.drafted, stats.accepted, stats.own) == (drafted, accepted, own)
    assert stats.acceptance_histogram == histogram


def test_rates_follow_their_definitions() -> None:
    """11 drafted, 4 accepted, 3 rounds that emitted 7 tokens."""
    stats = counted((4, 2, 3), (4, 0, 1), (3, 2, 3))
    assert stats.draft_acceptance_rate == pytest.approx(4 / 11)
    assert stats.mean_acceptance_length == pytest.approx(7 / 3)


def test_a_cut_token_counts_in_no_figure() -> None:
    """Both rounds' rule accepted 4 of 4, a stop left 2 of the second: 6 of 8 accepted, 7 tokens in 2 rounds."""
    stats = counted((4, 4, 5), (4, 2, 2))
    assert stats.draft_acceptance_rate == pytest.approx(6 / 8)
    assert stats.mean_acceptance_length == pytest.approx(7 / 2)


def test_rates_of_nothing_are_none() -> None:
    assert (Stats().draft_acceptance_rate, Stats().mean_acceptance_length, Stats().tokens_per_s) == (None, None, None)


def test_plain_decoding_has_no_acceptance_rate_and_one_token_a_round() -> None:
    stats = counted((0, 0, 1), (0, 0, 1))
    assert (stats.draft_acceptance_rate, stats.mean_acceptance_length) == (None, 1.0)


def test_a_drafter_that_is_always_wrong_has_a_rate_of_zero() -> None:
    assert counted((3, 0, 1)).draft_acceptance_rate == 0.0


@pytest.mark.parametrize(
    ("completion_tokens", "total_ms", "expected"),
    [
        (11, 600.0, 20.0),  # ten tokens after the first in the 500 ms after the prefill
        (2, 1100.0, 1.0),
        (1, 600.0, None),
        (0, 600.0, None),
        (5, 100.0, None),
    ],
)
def test_tokens_per_s_leaves_out_the_prefill_and_its_token(
    completion_tokens: int, total_ms: float, expected: float | None
) -> None:
    stats = Stats(completion_tokens=completion_tokens, prefill_ms=100.0, total_ms=total_ms)
    assert stats.tokens_per_s == expected


def test_host_ms_is_what_the_passes_leave() -> None:
    stats = Stats(prefill_ms=100.0, draft_ms=50.0, verify_ms=200.0, total_ms=365.0)
    assert stats.host_ms == 15.0


def test_host_ms_is_never_negative() -> None:
    assert Stats(prefill_ms=10.0, total_ms=0.0).host_ms == 0.0


def empty(stats: Stats) -> Result:
    return Result([], "", "length", None, None, Settings(), stats)


def test_the_json_has_exactly_these_keys_and_values() -> None:
    stats = counted((4, 2, 3), (4, 0, 1), (3, 2, 2))
    stats.prompt_tokens, stats.reused_prompt_tokens, stats.completion_tokens = 9, 6, 7
    stats.time_to_first_token_ms = 101.00004
    stats.prefill_ms, stats.draft_ms, stats.verify_ms, stats.total_ms = 100.0, 50.00004, 150.00006, 400.0
    logprobs = [TokenLogprobs(1, -0.5, ((4, -0.25), (1, -0.5))), TokenLogprobs(2, -1.0, ())]
    result = Result([1, 2, 3, 4, 5, 6, 7], "é text", "stop", " end", logprobs, Settings(), stats)
    expected = {
        "token_ids": [1, 2, 3, 4, 5, 6, 7],
        "text": "é text",
        "finish_reason": "stop",
        "stop": " end",
        "prompt_tokens": 9,
        "completion_tokens": 7,
        "logprobs": [
            {"token_id": 1, "logprob": -0.5, "top": ((4, -0.25), (1, -0.5))},
            {"token_id": 2, "logprob": -1.0, "top": ()},
        ],
        "settings": Settings().as_dict(),
        "stats": {
            "reused_prompt_tokens": 6,
            "rounds": 3,
            "drafted": 11,
            "accepted": 4,
            "draft_acceptance_rate": 0.3636,
            "mean_acceptance_length": 2.0,
            "acceptance_histogram": [1, 0, 2],
            "drafted_histogram": [0, 0, 0, 1, 2],
            "plain_round_ms": None,
            "estimated_speedup": None,
            "time_to_first_token_ms": 101.0,
            "prefill_ms": 100.0,
            "draft_ms": 50.0,
            "verify_ms": 150.0001,
            "host_ms": 99.9999,
            "total_ms": 400.0,
            "tokens_per_s": 20.0,
        },
    }
    assert result.as_dict() == expected
    plain = json.loads(json.dumps(result.as_dict()))
    assert plain["logprobs"][0]["top"] == [[4, -0.25], [1, -0.5]]
    assert {name: value for name, value in plain.items() if name != "logprobs"} == {
        name: value for name, value in expected.items() if name != "logprobs"
    }


def test_what_has_no_value_is_null_in_the_json() -> None:
    values = json.loads(json.dumps(empty(Stats()).as_dict()))
    absent = {
        "draft_acceptance_rate",
        "mean_acceptance_length",
        "tokens_per_s",
        "plain_round_ms",
        "estimated_speedup",
    }
    assert {name for name, value in values["stats"].items() if value is None} == absent
    assert {name for name, value in values.items() if value is None} == {"stop", "logprobs"}


def test_the_histogram_in_the_json_is_a_copy() -> None:
    stats = counted((4, 1, 2))
    figures = stats.as_dict()
    stats.add(Round([1], [1] * 4))
    assert figures["acceptance_histogram"] == [0, 1]
