"""From answers to figures: medians, tokens per second, ratios with intervals, and whether all ids agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from specrt.tools.bench.intervals import Interval, group_intervals, interval, mean_interval
from specrt.tools.bench.methods import METHODS, Answer
from specrt.tools.prompting.prompts import Prompt, bucket_of

REFERENCES = ("eager", "plain")
Answers = Mapping[str, Sequence[Sequence[Answer]]]
Comparison = tuple[float, Interval | None]  # a ratio of tokens per second, and its 95 % interval


@dataclass(frozen=True)
class Difference:
    """The first position where a method's ids differ from the expected ones; an id of None means that it had ended."""

    prompt: str
    position: int
    expected: int | None
    got: int | None

    def __str__(self) -> str:
        return f"{self.prompt}, position {self.position}: expected {_shown(self.expected)}, got {_shown(self.got)}"


@dataclass(frozen=True)
class Score:
    """A method over all prompts. Seconds are medians over the repeats, summed over the prompts.

    * ``tokens_per_s``: completion tokens over all seconds, prompt included; ``decode_tokens_per_s`` leaves out the
      first tokens and the time up to them.
    * ``ratio_to``: ``tokens_per_s`` over that of ``eager`` and of ``plain``, with a 95 % interval over prompts and
      runs (intervals.py; None for one prompt). A method gains nothing by ending early with fewer tokens.
    * ``interval_by_category`` of a category with few prompts uses the variance of all (intervals.py);
      ``mean_of_categories`` is the mean ratio, all categories weighted equally, and its interval. ``decode_...`` are
      the same after the first token, for categories with more than one token.
    * ``first_token_ms``: median over the prompts; ``gap_ms``: p50 and p95 of the time between two tokens as they
      arrive, 0 for those that arrive together.
    * ``acceptance_by_position``: of the rounds that verified drafted token i, the share that accepted it;
      ``mean_acceptance_length``: tokens per round, the target's own included.
    * ``round_ms``: a round's time by phase. ``peak_bytes``: resident memory of the method's process at its largest.
    * ``differences``: where ids differ from those of the first method, above temperature 0 from specrt's first one
      (transformers samples in another way, so its ids are not compared there).
    """

    method: str
    completion_tokens: int
    seconds: float
    tokens_per_s: float
    decode_tokens_per_s: float | None
    ratio_to: dict[str, float]
    interval_of: dict[str, Interval | None]
    tokens_per_s_by_category: dict[str, float]
    ratio_by_category: dict[str, dict[str, float]]
    interval_by_category: dict[str, dict[str, Interval | None]]
    mean_of_categories: dict[str, Comparison]
    decode_by_category: dict[str, dict[str, Comparison]]
    decode_mean_of_categories: dict[str, Comparison]
    ratio_by_bucket: dict[str, dict[str, float]]
    first_token_ms: float
    gap_ms: dict[str, float]
    draft_acceptance_rate: float | None
    acceptance_by_position: tuple[float, ...]
    acceptance_by_category: dict[str, float]
    mean_acceptance_length: float | None
    round_ms: dict[str, float]
    peak_bytes: int
    equal_prompts: int
    num_prompts: int
    differences: tuple[Difference, ...]

    @property
    def slower_categories(self) -> dict[str, tuple[float, Interval | None]]:
        """Every category whose displayed ratio to plain is below 1.00, with its interval; the slowest first."""
        intervals = self.interval_by_category.get("plain", {})
        slower = [(ratio, name) for name, ratio in self.ratio_by_category.get("plain", {}).items() if is_below(ratio)]
        return {name: (ratio, intervals.get(name)) for ratio, name in sorted(slower)}


def is_below(ratio: float) -> bool:
    """Whether a ratio is below 1.00 as tables display it, so that remarks and tables agree."""
    return round(ratio, 2) < 1


def first_difference(prompt: str, expected: Sequence[int], got: Sequence[int]) -> Difference | None:
    """The first position at which two sequences of ids differ, their ends included."""
    for position in range(max(len(expected), len(got))):
        ours = expected[position] if position < len(expected) else None
        theirs = got[position] if position < len(got) else None
        if ours != theirs:
            return Difference(prompt, position, ours, theirs)
    return None


def score(
    answers: Answers, prompts: Sequence[Prompt], lengths: Sequence[int], temperature: float = 0.0
) -> tuple[Score, ...]:
    """A score for each method. ``answers[name][prompt]`` has one answer a repeat; ``lengths`` are the prompts'."""
    return tuple(_score(name, answers, prompts, lengths, temperature) for name in answers)


def _score(name: str, answers: Answers, prompts: Sequence[Prompt], lengths: Sequence[int], temperature: float) -> Score:
    ours = answers[name]
    differences = _differences(name, answers, prompts, temperature)
    references = {other: answers[other] for other in REFERENCES if other in answers}
    categories = _indices([prompt.category for prompt in prompts])
    buckets = _indices([bucket_of(length) for length in lengths])
    firsts = [answer for repeats in ours for answer in repeats]
    decoding = {other: _after_first(repeated) for other, repeated in {name: ours, **references}.items()}
    by_category = {other: _comparisons(decoding[name], decoding[other], categories) for other in references}
    gaps = [gap for answer in firsts for gap in answer.gaps_ms]
    rounds = [pair for answer in firsts for pair in answer.rounds]
    drafted, accepted = sum(d for d, _ in rounds), sum(a for _, a in rounds)
    return Score(
        method=name,
        completion_tokens=_num_tokens(ours),
        seconds=_seconds(ours),
        tokens_per_s=_tokens_per_s(ours),
        decode_tokens_per_s=_tokens_per_s(decoding[name]) or None,
        ratio_to={other: _ratio_of(ours, theirs) for other, theirs in references.items()},
        interval_of={other: interval(ours, theirs) for other, theirs in references.items()},
        tokens_per_s_by_category={c: _tokens_per_s(_pick(ours, i)) for c, i in categories.items()},
        ratio_by_category=_ratios(ours, references, categories),
        interval_by_category={other: group_intervals(ours, theirs, categories) for other, theirs in references.items()},
        mean_of_categories={other: mean_interval(ours, theirs, categories) for other, theirs in references.items()},
        decode_by_category=by_category,
        decode_mean_of_categories={
            other: mean_interval(decoding[name], decoding[other], {c: categories[c] for c in by_category[other]})
            for other in references
        },
        ratio_by_bucket=_ratios(ours, references, buckets),
        first_token_ms=median(_median_first(repeats) for repeats in ours) * 1e3,
        gap_ms={f"p{q}": float(np.percentile(gaps, q)) for q in (50, 95)} if gaps else {},
        draft_acceptance_rate=accepted / drafted if drafted else None,
        acceptance_by_position=by_position(rounds),
        acceptance_by_category=_acceptances(ours, categories),
        mean_acceptance_length=sum(max(0, len(a.token_ids) - 1) for a in firsts) / len(rounds) if rounds else None,
        round_ms=_round_ms(firsts, len(rounds)),
        peak_bytes=max((answer.peak_bytes for answer in firsts), default=0),
        equal_prompts=differences.count(None),
        num_prompts=len(prompts),
        differences=tuple(d for d in differences if d is not None),
    )


def _differences(name: str, answers: Answers, prompts: Sequence[Prompt], temperature: float) -> list[Difference | None]:
    """The first difference of each prompt, over all repeats."""
    names = [other for other in answers if not temperature or _is_ours(other)]
    if name not in names:
        return [None] * len(prompts)
    expected = [repeats[0].token_ids for repeats in answers[names[0]]]
    return [
        next((d for answer in repeats if (d := first_difference(prompt.name, ids, answer.token_ids))), None)
        for prompt, ids, repeats in zip(prompts, expected, answers[name], strict=True)
    ]


def _is_ours(name: str) -> bool:
    return name in METHODS and METHODS[name].library == "specrt"


def by_position(rounds: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Of the rounds that verified drafted token i, the share that accepted it; ends at the first i without a round."""
    shares: list[float] = []
    for i in range(int(max((drafted for drafted, _ in rounds), default=0))):
        verified = [accepted for drafted, accepted in rounds if drafted > i and accepted >= i]
        if not verified:
            break
        shares.append(sum(accepted > i for accepted in verified) / len(verified))
    return tuple(shares)


def _indices(keys: Sequence[str]) -> dict[str, list[int]]:
    return {key: [i for i, other in enumerate(keys) if other == key] for key in dict.fromkeys(keys)}


def _pick(prompts: Sequence[Sequence[Answer]], indices: Sequence[int]) -> list[Sequence[Answer]]:
    return [prompts[i] for i in indices]


def _ratios(
    ours: Sequence[Sequence[Answer]], references: Answers, groups: Mapping[str, Sequence[int]]
) -> dict[str, dict[str, float]]:
    return {
        other: {name: _ratio_of(_pick(ours, i), _pick(theirs, i)) for name, i in groups.items()}
        for other, theirs in references.items()
    }


def _comparisons(
    ours: Sequence[Sequence[Answer]], theirs: Sequence[Sequence[Answer]], groups: Mapping[str, Sequence[int]]
) -> dict[str, Comparison]:
    """Comparisons for the groups in which both have a speed."""
    intervals = group_intervals(ours, theirs, groups)
    ratios = {name: _ratio_of(_pick(ours, i), _pick(theirs, i)) for name, i in groups.items()}
    return {name: (ratio, intervals[name]) for name, ratio in ratios.items() if ratio}


def _after_first(prompts: Sequence[Sequence[Answer]]) -> list[list[Answer]]:
    return [[answer.after_first for answer in repeats] for repeats in prompts]


def _acceptances(ours: Sequence[Sequence[Answer]], groups: Mapping[str, Sequence[int]]) -> dict[str, float]:
    rates = {}
    for name, indices in groups.items():
        rounds = [pair for repeats in _pick(ours, indices) for answer in repeats for pair in answer.rounds]
        if drafted := sum(d for d, _ in rounds):
            rates[name] = sum(a for _, a in rounds) / drafted
    return rates


def _round_ms(answers: Sequence[Answer], num_rounds: int) -> dict[str, float]:
    phases = ("draft", "verify", "host")
    totals = {phase: sum(answer.phase_ms.get(phase, 0.0) for answer in answers) for phase in phases}
    return {phase: total / num_rounds for phase, total in totals.items()} if num_rounds else {}


def _median_first(repeats: Sequence[Answer]) -> float:
    return median(answer.first_token_seconds for answer in repeats)


def _num_tokens(prompts: Sequence[Sequence[Answer]]) -> int:
    """The tokens of the first repeat; the other repeats are compared with it elsewhere."""
    return sum(len(repeats[0].token_ids) for repeats in prompts)


def _seconds(prompts: Sequence[Sequence[Answer]]) -> float:
    return sum(median(answer.seconds for answer in repeats) for repeats in prompts)


def _tokens_per_s(prompts: Sequence[Sequence[Answer]]) -> float:
    return _ratio(_num_tokens(prompts), _seconds(prompts))


def _ratio_of(ours: Sequence[Sequence[Answer]], theirs: Sequence[Sequence[Answer]]) -> float:
    return _ratio(_tokens_per_s(ours), _tokens_per_s(theirs))


def _ratio(value: float, reference: float) -> float:
    return value / reference if reference > 0 else 0.0


def _shown(token: int | None) -> str:
    return "the end" if token is None else f"id {token}"
