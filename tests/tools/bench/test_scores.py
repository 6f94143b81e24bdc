"""Scores: figures from hand-made timings, methods that report false ids or are slow, acceptance by position."""

from __future__ import annotations

import pytest

from specrt.tools.bench.methods import Answer
from specrt.tools.bench.scores import Difference, Score, by_position, first_difference, score
from specrt.tools.bench.tables import _against_plain
from specrt.tools.prompting.prompts import Prompt

PROMPTS = [Prompt("chat", ""), Prompt("math", "")]


def answer(ids: list[int], seconds: float, first: float = 0.0, rounds: list[tuple[int, int]] | None = None) -> Answer:
    arrivals = ((first, 1), (seconds, len(ids) - 1)) if len(ids) > 1 else ((first, 1),)
    return Answer(tuple(ids), seconds, arrivals if ids else (), tuple(rounds or ()))


def scores(**answers: list[list[Answer]]) -> dict[str, Score]:
    return {row.method: row for row in score(answers, PROMPTS, [10, 400])}


def repeated(ids: list[int], *seconds: float) -> list[Answer]:
    return [answer(ids, s) for s in seconds]


EAGER = [repeated([1, 2, 3, 4], 2.0, 9.0, 1.0), repeated([5, 6], 1.0, 1.0, 1.0)]


def test_seconds_are_medians_summed_over_the_prompts() -> None:
    row = scores(eager=EAGER)["eager"]
    assert (row.seconds, row.completion_tokens, row.tokens_per_s) == (3.0, 6, 2.0)
    assert row.tokens_per_s_by_category == {"chat": 2.0, "math": 2.0}
    assert row.ratio_to == {"eager": 1.0}


def test_decoding_leaves_out_the_first_tokens_and_their_time() -> None:
    prompts = [[answer([1, 2, 3], 3.0, 1.0), answer([1, 2, 3], 5.0, 4.0)], [answer([4, 5], 2.0, 1.5)]]
    row = scores(eager=prompts)["eager"]
    assert row.decode_tokens_per_s == pytest.approx((2 + 1) / (1.5 + 0.5))


def test_decoding_is_compared_by_category_too() -> None:
    """chat: 3 tokens after the first in 2 s against 1 s; math has one token, so nothing comes after it."""
    plain = [[answer([1, 2, 3, 4], 3.0, 1.0)], [answer([5], 1.0, 1.0)]]
    model = [[answer([1, 2, 3, 4], 2.0, 1.0)], [answer([5], 1.0, 1.0)]]
    row = scores(plain=plain, model=model)["model"]
    by_category = row.decode_by_category["plain"]
    assert list(by_category) == ["chat"]
    for ratio, interval in (by_category["chat"], row.decode_mean_of_categories["plain"]):
        assert ratio == pytest.approx(2.0) and interval is None
    assert row.ratio_by_category["plain"]["chat"] == pytest.approx(1.5)


def test_one_token_has_no_decoding_speed() -> None:
    assert scores(eager=[[answer([1], 1.0, 1.0)], [answer([2], 1.0, 1.0)]])["eager"].decode_tokens_per_s is None


def test_ratios_are_to_eager_and_to_plain() -> None:
    plain = [repeated([1, 2, 3, 4], 1.0), repeated([5, 6], 0.5)]
    model = [repeated([1, 2, 3, 4], 0.25), repeated([5, 6], 0.5)]
    rows = scores(eager=EAGER, plain=plain, model=model)
    assert rows["plain"].ratio_to == {"eager": 2.0, "plain": 1.0}
    assert rows["model"].ratio_to == {"eager": 4.0, "plain": 2.0}
    assert rows["model"].ratio_by_category == {
        "eager": {"chat": 8.0, "math": 2.0},
        "plain": {"chat": 4.0, "math": 1.0},
    }
    assert [row.equal_prompts for row in rows.values()] == [2, 2, 2]


def test_a_slower_method_is_reported_as_slower() -> None:
    slow = [repeated([1, 2, 3, 4], 4.0), repeated([5, 6], 2.0)]
    row = scores(eager=EAGER, ngram=slow)["ngram"]
    assert row.ratio_to == {"eager": 0.5}
    assert row.differences == ()


def test_other_ids_are_reported_with_their_place() -> None:
    liar = [repeated([1, 2, 7, 4], 1.0), repeated([5, 6], 1.0)]
    row = scores(eager=EAGER, model=liar)["model"]
    assert (row.equal_prompts, row.num_prompts) == (1, 2)
    assert row.differences == (Difference("chat", 2, 3, 7),)
    assert str(row.differences[0]) == "chat, position 2: expected id 3, got id 7"


def test_ending_early_is_reported_and_earns_nothing() -> None:
    """A method that drops half of its tokens and takes half of the time is no faster."""
    liar = [repeated([1, 2], 1.0), repeated([5], 0.5)]
    row = scores(eager=EAGER, model=liar)["model"]
    assert row.ratio_to == {"eager": 1.0}
    assert row.differences == (Difference("chat", 2, 3, None), Difference("math", 1, 6, None))


def test_a_is_in_any_repeat_is_found() -> None:
    liar = [[answer([1, 2, 3, 4], 1.0), answer([1, 2, 3, 4, 5], 1.0)], repeated([5, 6], 1.0)]
    row = scores(eager=EAGER, model=liar)["model"]
    assert row.differences == (Difference("chat", 4, None, 5),)


def test_the_first_method_must_agree_with_itself() -> None:
    wavering = [[answer([1, 2], 1.0), answer([1, 3], 1.0)], repeated([5], 1.0)]
    assert scores(eager=wavering)["eager"].equal_prompts == 1


def test_no_tokens_are_no_speed() -> None:
    row = scores(eager=EAGER, model=[repeated([], 1.0), repeated([], 1.0)])["model"]
    assert (row.tokens_per_s, row.ratio_to) == (0.0, {"eager": 0.0})


def test_acceptance_is_summed_before_it_is_divided() -> None:
    texts = [[answer([1] * 9, 1.0, rounds=[(4, 4), (4, 2)])], [answer([1] * 4, 1.0, rounds=[(2, 0), (0, 0), (0, 0)])]]
    row = scores(model=texts)["model"]
    assert row.draft_acceptance_rate == pytest.approx(6 / 10)
    assert row.mean_acceptance_length == pytest.approx((8 + 3) / 5)
    assert row.acceptance_by_category == {"chat": 6 / 8, "math": 0.0}
    assert scores(eager=EAGER)["eager"].mean_acceptance_length is None


def test_acceptance_by_position_counts_the_rounds_that_came_so_far() -> None:
    assert by_position([(3, 3), (3, 1), (1, 0), (0, 0)]) == (2 / 3, 1 / 2, 1.0)
    assert by_position([(3, 0)]) == (0.0,)
    assert by_position([]) == ()


def test_gaps_are_what_a_reader_waits() -> None:
    burst = Answer((1, 2, 3, 4), 1.0, ((0.5, 1), (0.7, 2), (1.0, 1)))
    assert burst.gaps_ms == pytest.approx([200, 0, 300])
    assert (burst.first_token_seconds, burst.num_first_tokens) == (0.5, 1)
    first_many = Answer((1, 2, 3), 1.0, ((0.5, 2), (0.6, 1)))
    assert first_many.gaps_ms == pytest.approx([0, 100])


def test_phases_are_of_a_round() -> None:
    row = scores(model=[[Answer((1, 2), 1.0, ((0.5, 1),), ((4, 1), (4, 0)), {"draft": 3.0, "verify": 5.0})]] * 2)[
        "model"
    ]
    assert row.round_ms == {"draft": 1.5, "verify": 2.5, "host": 0.0}


def test_every_category_below_plain_is_named_with_what_is_known_of_it() -> None:
    """0.98 too, which a threshold once left out; what is shown as 1.00 is not below it."""
    slower = {
        "lost": [1.25] * 5,
        "unsure": [0.9, 1.3, 0.95, 1.2, 1.1],
        "one": [1.02],
        "even": [1.003] * 5,
        "won": [0.5] * 5,
    }
    prompts = [Prompt(name, "", number=n) for name, seconds in slower.items() for n, _ in enumerate(seconds)]
    answers = {
        "plain": [[answer([1] * 10, 1.0)]] * len(prompts),
        "ngram": [[answer([1] * 10, s)] for seconds in slower.values() for s in seconds],
    }
    row = score(answers, prompts, [1] * len(prompts))[1]
    found = row.slower_categories
    assert list(found) == ["lost", "unsure", "one"]
    assert found["lost"][0] == pytest.approx(0.8) and found["lost"][1] == pytest.approx((0.8, 0.8))
    for name in ("unsure", "one"):  # the single prompt of one has the spread of all
        ratio, interval = found[name]
        assert interval is not None and interval[0] < ratio < 1 < interval[1]
    line = _against_plain(row)
    assert "it loses in lost 0.80x (0.80 to 0.80);" in line
    assert "below 1.00, but not distinguishable from it, in unsure 0.92x (" in line and ", one 0.98x (" in line


def test_of_single_prompts_no_spread_is_known() -> None:
    plain = [[answer([1] * 10, 1.0)]] * 2
    row = score({"plain": plain, "x": [[answer([1] * 10, 1.25)]] * 2}, PROMPTS, [1, 1])[1]
    assert set(row.interval_by_category["plain"].values()) == {None}
    mean, interval = row.mean_of_categories["plain"]
    assert mean == pytest.approx(0.8) and interval is None
    assert "chat 0.80x (one prompt), math 0.80x (one prompt)" in _against_plain(row)


def test_the_winner_is_decided_by_the_whole_interval() -> None:
    plain = [[answer([1] * 10, 1.0)]] * 2
    for seconds, word in (((0.5, 0.5), "wins over"), ((2.0, 2.0), "LOSES to"), ((0.5, 1.5), "cannot be distinguished")):
        row = score({"plain": plain, "x": [[answer([1] * 10, s)] for s in seconds]}, PROMPTS, [1, 1])[1]
        assert _against_plain(row).startswith(f"x {word} ")
    row = score({"plain": plain[:1], "x": plain[:1]}, PROMPTS[:1], [1])[1]
    assert _against_plain(row) == "x: 1.00x plain decoding, from one prompt only"


def test_ratios_by_length() -> None:
    plain = [repeated([1, 2, 3, 4], 1.0), repeated([5, 6], 0.5)]
    ngram = [repeated([1, 2, 3, 4], 0.5), repeated([5, 6], 0.6)]
    row = scores(plain=plain, ngram=ngram)["ngram"]
    assert row.ratio_by_bucket["plain"] == {"short": 2.0, "long": pytest.approx(0.5 / 0.6)}


def test_sampled_ids_are_compared_among_ours_only() -> None:
    """transformers draws with another generator; specrt's methods share a seed and must agree."""
    texts = {
        "eager": [[answer([9], 1.0)], [answer([9], 1.0)]],
        "plain": [[answer([1], 1.0)], [answer([2], 1.0)]],
        "ngram": [[answer([1], 1.0)], [answer([3], 1.0)]],
    }
    rows = {row.method: row for row in score(texts, PROMPTS, [1, 1], temperature=0.7)}
    assert {name: row.equal_prompts for name, row in rows.items()} == {"eager": 2, "plain": 2, "ngram": 1}


def test_equal_ids_do_not_differ() -> None:
    assert first_difference("x", [], []) is None
    assert first_difference("x", [1, 2], [1, 2]) is None
