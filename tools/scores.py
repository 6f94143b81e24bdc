"""From answers to figures: medians, tokens per second, ratios, and whether everybody said the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import Console
from rich.table import Table

from specrt.tools.contenders import Answer

REFERENCES = ("eager", "plain")
Answers = Mapping[str, Sequence[Sequence[Answer]]]


@dataclass(frozen=True)
class Difference:
    """Where a contender's ids first leave those of the first contender; None: it had ended."""

    category: str
    position: int
    expected: int | None
    got: int | None

    def __str__(self) -> str:
        return f"{self.category}, position {self.position}: expected {_shown(self.expected)}, got {_shown(self.got)}"


@dataclass(frozen=True)
class Score:
    """A contender over all prompts. Seconds are medians over the repeats, summed over the prompts.

    ``tokens_per_s`` is completion tokens over all seconds, prompt included; ``decode_tokens_per_s`` leaves the first
    tokens and the time up to them out. ``ratio_to`` divides ``tokens_per_s`` by that of ``eager`` and of ``plain``:
    with equal ids, that is how often their seconds hold ours; with fewer tokens, it earns nothing by ending early.
    ``mean_acceptance_length`` is tokens per round, the target's own included.
    """

    contender: str
    completion_tokens: int
    seconds: float
    tokens_per_s: float
    decode_tokens_per_s: float | None
    ratio_to: dict[str, float]
    tokens_per_s_by_category: dict[str, float]
    ratio_by_category: dict[str, dict[str, float]]
    draft_acceptance_rate: float | None
    mean_acceptance_length: float | None
    equal_prompts: int
    num_prompts: int
    differences: tuple[Difference, ...]


def first_difference(category: str, expected: Sequence[int], got: Sequence[int]) -> Difference | None:
    """The first position at which two sequences of ids differ, their ends included."""
    for position in range(max(len(expected), len(got))):
        ours = expected[position] if position < len(expected) else None
        theirs = got[position] if position < len(got) else None
        if ours != theirs:
            return Difference(category, position, ours, theirs)
    return None


def score(answers: Answers, categories: Sequence[str]) -> tuple[Score, ...]:
    """A score for each contender. ``answers[name][prompt]`` has one answer a repeat; the first name's ids count."""
    return tuple(_score(name, answers, categories) for name in answers)


def _score(name: str, answers: Answers, categories: Sequence[str]) -> Score:
    expected = [repeats[0].token_ids for repeats in next(iter(answers.values()))]
    differences = [
        next((d for answer in repeats if (d := first_difference(category, ids, answer.token_ids))), None)
        for category, ids, repeats in zip(categories, expected, answers[name], strict=True)
    ]
    references = {other: answers[other] for other in REFERENCES if other in answers}
    total = _tokens_per_s(answers[name])
    by_category = {category: _tokens_per_s([answers[name][i]]) for i, category in enumerate(categories)}
    firsts = [answer for repeats in answers[name] for answer in repeats]
    totals = {
        key: sum(answer.stats.get(key, 0) for answer in firsts) for key in ("rounds", "drafted", "accepted", "own")
    }
    return Score(
        contender=name,
        completion_tokens=_num_tokens(answers[name]),
        seconds=_seconds(answers[name]),
        tokens_per_s=total,
        decode_tokens_per_s=_decode_tokens_per_s(answers[name]),
        ratio_to={other: _ratio(total, _tokens_per_s(theirs)) for other, theirs in references.items()},
        tokens_per_s_by_category=by_category,
        ratio_by_category={
            other: {c: _ratio(by_category[c], _tokens_per_s([theirs[i]])) for i, c in enumerate(categories)}
            for other, theirs in references.items()
        },
        draft_acceptance_rate=totals["accepted"] / totals["drafted"] if totals["drafted"] else None,
        mean_acceptance_length=(totals["accepted"] + totals["own"]) / totals["rounds"] if totals["rounds"] else None,
        equal_prompts=differences.count(None),
        num_prompts=len(categories),
        differences=tuple(d for d in differences if d is not None),
    )


def _num_tokens(prompts: Sequence[Sequence[Answer]]) -> int:
    """Of the first repeat; that all repeats agree with it is checked apart."""
    return sum(len(repeats[0].token_ids) for repeats in prompts)


def _seconds(prompts: Sequence[Sequence[Answer]]) -> float:
    return sum(median(answer.seconds for answer in repeats) for repeats in prompts)


def _tokens_per_s(prompts: Sequence[Sequence[Answer]]) -> float:
    return _ratio(_num_tokens(prompts), _seconds(prompts))


def _decode_tokens_per_s(prompts: Sequence[Sequence[Answer]]) -> float | None:
    tokens = _num_tokens(prompts) - sum(repeats[0].num_first_tokens for repeats in prompts)
    seconds = sum(median(answer.seconds - answer.first_token_seconds for answer in repeats) for repeats in prompts)
    return tokens / seconds if tokens > 0 and seconds > 0 else None


def _ratio(value: float, reference: float) -> float:
    return value / reference if reference > 0 else 0.0


def _shown(token: int | None) -> str:
    return "the end" if token is None else f"id {token}"


def print_scores(console: Console, scores: Sequence[Score]) -> None:
    """The scores as two tables, and where ids differ, one line for each prompt."""
    references = list(scores[0].ratio_to)
    table = Table(title="tokens/s: completion tokens over all seconds, prompt included", title_justify="left")
    table.add_column("contender")
    headings = ["tokens/s", "after the first", *(f"x {name}" for name in references), "tokens per round", "same ids"]
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in scores:
        ratios = [f"{row.ratio_to[name]:.2f}" for name in references]
        decode, length = _figure(row.decode_tokens_per_s, 1), _figure(row.mean_acceptance_length, 2)
        same = f"{row.equal_prompts} of {row.num_prompts}"
        table.add_row(row.contender, f"{row.tokens_per_s:.1f}", decode, *ratios, length, same)
    console.print(table)
    _print_categories(console, scores, references[-1:])
    for row in scores:
        for difference in row.differences:
            console.print(f"{row.contender} differs from {scores[0].contender} in {difference}", highlight=False)


def _print_categories(console: Console, scores: Sequence[Score], references: Sequence[str]) -> None:
    against = f", and times the {references[0]} contender's" if references else ""
    table = Table(title=f"tokens/s by prompt{against}", title_justify="left")
    table.add_column("prompt")
    for row in scores:
        table.add_column(row.contender, justify="right")
    for category in scores[0].tokens_per_s_by_category:
        cells = [f"{row.tokens_per_s_by_category[category]:.1f}" for row in scores]
        for name in references:
            ratios = [row.ratio_by_category[name][category] for row in scores]
            cells = [f"{cell} ({ratio:.2f})" for cell, ratio in zip(cells, ratios, strict=True)]
        table.add_row(category, *cells)
    console.print(table)


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
