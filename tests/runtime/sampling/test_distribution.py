"""``block`` in the real loop: the first tokens have the target's distribution, and the classic bugs fail.

A run is a generation with its own seed on target, draft, samplers and slot, of one to three rounds. The exact
distribution of the first tokens is worked out from the table. The chance that a right loop fails is 1e-4 for each test,
and the seeds are fixed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from specrt.engines.interface import Array
from specrt.engines.samplers import DRAFT_PROBS
from specrt.runtime.drafting.drafters import ModelDrafter
from specrt.runtime.round import generate_rounds
from specrt.runtime.sampling.draft_sampler import DraftSampler
from specrt.runtime.sampling.uniforms import Uniforms
from specrt.runtime.settings import Settings
from tests.runtime.support.fakes import Draft, Pair, limits_of, pair_of
from tests.runtime.support.plain import distribution, penalized
from tests.runtime.support.tables import Logits, hashed_logits, noisy

SETTINGS = Settings(temperature=1.5, draft="model", rule="block", num_speculative_tokens=3, max_new_tokens=12)
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
PROMPT = [1, 2]
MIN_EXPECTED = 5  # runs in a cell
NORMAL_QUANTILE = 3.719  # of 1 - 1e-4

Tokens = tuple[int, ...]


def chances_of(table: Logits, settings: Settings, length: int, vocab_size: int) -> dict[Tokens, float]:
    """The chance of each sequence of ``length`` tokens after the prompt."""
    chances: dict[Tokens, float] = {(): 1.0}
    for _ in range(length):
        longer = {}
        for tokens, chance in chances.items():
            sequence = [*PROMPT, *tokens]
            p = distribution(penalized(table(sequence), settings, sequence, len(PROMPT)), settings)
            longer.update({(*tokens, token): chance * p[token] for token in range(vocab_size)})
        chances = longer
    return chances


MakeDraft = Callable[[Pair, Settings], Draft]


def tokens_of_runs(
    pair: Pair, settings: Settings, length: int, num_runs: int, make_draft: MakeDraft, drafter: type[ModelDrafter]
) -> Counter[Tokens]:
    """How often each sequence of the first ``length`` tokens came, over seeds 0, 1 .."""
    found: Counter[Tokens] = Counter()
    limits = limits_of(settings.num_speculative_tokens, settings.max_new_tokens)
    for seed in range(num_runs):
        seeded = replace(settings, seed=seed)
        target = pair.begin_target(seeded, PROMPT)
        drafting = drafter(*make_draft(pair, seeded), pair.engine.spec.vocab_size)
        completion = limits.completion(PROMPT)
        for _ in generate_rounds(completion, target, drafting):
            if len(completion.new_tokens) >= length:
                break
        found[tuple(completion.new_tokens[:length])] += 1
    return found


def excess(found: Counter[Tokens], distribution: dict[Tokens, float]) -> float:
    """Pearson's chi-square as a normal deviate (Wilson and Hilferty 1931); rare sequences share a cell."""
    num_runs = found.total()
    assert all(distribution[tokens] > 0 for tokens in found)
    cells, rare = [], [0.0, 0.0]
    for tokens, chance in sorted(distribution.items(), key=lambda item: item[1]):
        rare = [rare[0] + num_runs * chance, rare[1] + found[tokens]]
        if rare[0] >= MIN_EXPECTED:
            cells.append(rare)
            rare = [0.0, 0.0]
    cells[-1] = [cells[-1][0] + rare[0], cells[-1][1] + rare[1]]
    square = sum((observed - expected) ** 2 / expected for expected, observed in cells)
    freedom = len(cells) - 1
    return float(((square / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / (2 / (9 * freedom)) ** 0.5)


@dataclass(frozen=True)
class Experiment:
    """Target and draft over ``vocab_size`` ids, and how many tokens are looked at."""

    vocab_size: int
    length: int

    def excess(
        self,
        settings: Settings,
        num_runs: int,
        make_draft: MakeDraft = lambda pair, settings: pair.begin_draft(settings, PROMPT),
        drafter: type[ModelDrafter] = ModelDrafter,
    ) -> float:
        table = hashed_logits(1, self.vocab_size)
        pair = pair_of(table, noisy(table, 2, self.vocab_size, 0.5), self.vocab_size)
        found = tokens_of_runs(pair, settings, self.length, num_runs, make_draft, drafter)
        return excess(found, chances_of(table, settings, self.length, self.vocab_size))


ROUNDS, WIDE = Experiment(3, 4), Experiment(8, 2)


@pytest.mark.parametrize(
    ("experiment", "changes", "num_runs"),
    [
        (ROUNDS, {}, 1500),
        (WIDE, {"num_speculative_tokens": 1, "reproducible": True}, 1000),
        (ROUNDS, {"top_p": 0.9, **PENALTIES}, 1000),
    ],
    ids=["two rounds", "eight ids", "processed"],
)
def test_the_first_tokens_have_the_target_s_distribution(
    experiment: Experiment, changes: dict[str, Any], num_runs: int
) -> None:
    assert experiment.excess(replace(SETTINGS, **changes), num_runs) < NORMAL_QUANTILE


class Mixed(ModelDrafter):
    """Samples in every other round, and else submits chosen ids, like a lookup."""

    is_sampled = True

    def propose(self, committed: Sequence[int], k: int) -> list[int]:
        self.is_sampled = len(committed) % 2 == 0
        return super().propose(committed, k) if self.is_sampled else [1, 0, 1][:k]


def test_rounds_of_both_kinds_of_draft_keep_the_target_s_distribution() -> None:
    assert ROUNDS.excess(SETTINGS, 1500, drafter=Mixed) < NORMAL_QUANTILE


# --- what must fail ------------------------------------------------------------------------------------------------


class WrongProbs(DraftSampler):
    """A sampler whose probabilities are not those that its ids were drawn from."""

    probs: Array

    def draw(self, width: int, committed: Sequence[int], drafted: Sequence[int]) -> int | None:
        token = super().draw(width, committed, drafted)
        self.spoil(len(drafted))
        return token

    def spoil(self, step: int) -> None:
        raise NotImplementedError


class AnotherTemperature(WrongProbs):
    def spoil(self, step: int) -> None:
        flatter = self.probs[step] ** 0.5
        self.probs[step] = flatter / flatter.sum()


class OneStepLate(WrongProbs):
    def spoil(self, step: int) -> None:
        if step > 0:
            self.probs[[step - 1, step]] = self.probs[[step, step - 1]]


class Stuck(WrongProbs):
    """Every step is verified by the first one's."""

    def spoil(self, step: int) -> None:
        self.probs[step] = self.probs[0]


@pytest.mark.parametrize("kind", [AnotherTemperature, OneStepLate, Stuck])
def test_wrong_draft_probabilities_are_noticed(kind: type[WrongProbs]) -> None:
    def make_draft(pair: Pair, settings: Settings) -> Draft:
        wrong = kind(pair.draft, pair.target, settings, len(PROMPT))
        wrong.probs = pair.target.samplers.host[DRAFT_PROBS]
        return Draft(pair.begin_draft(settings, PROMPT).model, wrong)

    assert ROUNDS.excess(SETTINGS, 500, make_draft) > NORMAL_QUANTILE


class Dropping(ModelDrafter):
    """Submits what it drew up to the first id 0: dropping a drawn id for what it is biases the text."""

    def propose(self, committed: Sequence[int], k: int) -> list[int]:
        drafted = super().propose(committed, k)
        return drafted[: drafted.index(0)] if 0 in drafted else drafted


class Pretending(Mixed):
    """Claims that chosen ids were drawn from the probabilities in memory."""

    def propose(self, committed: Sequence[int], k: int) -> list[int]:
        drafted = super().propose(committed, k)
        self.is_sampled = True
        return drafted


def test_a_lookup_verified_as_if_it_were_sampled_is_noticed() -> None:
    assert ROUNDS.excess(SETTINGS, 1000, drafter=Pretending) > NORMAL_QUANTILE


def test_dropping_drawn_ids_is_noticed() -> None:
    assert ROUNDS.excess(SETTINGS, 500, drafter=Dropping) > NORMAL_QUANTILE


def test_numbers_that_come_again_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """``block`` with the numbers of the position: what is beyond those accepted is verified again with the same."""

    def by_position(self: Uniforms, stream: int, num_committed: int, count: int) -> Array:
        return self._rows(stream, (num_committed, 0), count)

    monkeypatch.setattr(Uniforms, "of_round", by_position)
    assert ROUNDS.excess(SETTINGS, 2000) > NORMAL_QUANTILE


def test_the_same_numbers_for_draft_and_decision_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Uniforms.of_round

    def one_stream(self: Uniforms, stream: int, num_committed: int, count: int) -> Array:
        return right(self, 1, num_committed, count)[:, [2, 2, 2]]

    monkeypatch.setattr(Uniforms, "of_round", one_stream)
    assert ROUNDS.excess(SETTINGS, 500) > NORMAL_QUANTILE
