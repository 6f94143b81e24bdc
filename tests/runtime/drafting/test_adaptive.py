"""The controller on a simulated machine: near the best fixed K, small or large, and plain where none pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest

from specrt.engines.experts import Experts
from specrt.runtime.drafting.acceptance import expected_tokens
from specrt.runtime.drafting.adaptive import MODEL, NGRAM_LENGTHS, AdaptiveDrafter, OnlineEstimates, ngram_source
from specrt.runtime.drafting.drafters import ModelDrafter, NGramDrafter
from specrt.runtime.drafting.tuning import Tuning

K = 8


@dataclass
class Machine:
    """A clock in seconds, and passes that take ms: ``1 + slope`` for each further token of the target's."""

    slope: float
    draft_ms: float
    target_ms: float = 10.0
    now: float = 0.0
    widths: list[int] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def run_target(self, width: int) -> None:
        self.widths.append(width)
        self.now += self.target_ms * (1 + self.slope * (width - 1)) / 1e3

    def run_draft(self, pending: int, k: int) -> None:
        self.now += self.draft_ms * (k + 0.02 * max(0, pending - 1)) / 1e3


@dataclass
class SimulatedModel:
    """Stands for ``ModelDrafter``: drafts cost time on ``machine``; whether they are right is drawn later."""

    machine: Machine
    kv_len: int = 0
    is_sampled = True
    context: int = 10**9
    calls: list[int] = field(default_factory=list)

    def prefill(self, committed: Sequence[int]) -> None:
        self.propose(committed, 0)

    def propose(self, committed: Sequence[int], k: int) -> list[int]:
        self.calls.append(k)
        self.machine.run_draft(self.num_pending(committed), k)
        self.kv_len = len(committed)
        return [0] * k

    def can_propose(self, committed: Sequence[int]) -> bool:
        return len(committed) <= self.context

    def num_pending(self, committed: Sequence[int]) -> int:
        return len(committed) - self.kv_len

    def rollback(self, num_committed: int) -> None:
        self.kv_len = min(self.kv_len, num_committed - 1)


def simulate(drafter: AdaptiveDrafter, machine: Machine, *phases: tuple[float, int], seed: int = 0) -> list[float]:
    """Tokens a ms in each phase of one text: each drafted token right with chance ``rate``, for ``num`` tokens."""
    rng = np.random.default_rng(seed)
    tokens = list(range(1000, 1020))  # nothing repeats, so that a lookup finds nothing
    drafter.prefill(tokens[:-1])
    speeds = []
    for rate, num in phases:
        started, before = machine.now, len(tokens)
        while len(tokens) < before + num:
            drafted = drafter.propose(tokens, K)
            machine.run_target(len(drafted) + 1)
            hits = rng.random(len(drafted)) < rate
            accepted = len(drafted) if hits.all() else int(hits.argmin())
            tokens += range(len(tokens) + 1000, len(tokens) + 1000 + accepted + 1)
            drafter.rollback(len(tokens))
        speeds.append((len(tokens) - before) / (machine.now - started) / 1e3)
    return speeds


def best_fixed(machine: Machine, rate: float) -> float:
    """Tokens a ms of the best K, 0 included, when rates and times are known."""
    tokens = expected_tokens([rate] * K)
    return max(
        tokens[k] / (machine.target_ms * (1 + machine.slope * k) + k * machine.draft_ms) for k in range(len(tokens))
    )


def adaptive(machine: Machine, estimates: OnlineEstimates | None = None) -> AdaptiveDrafter:
    estimates = estimates or OnlineEstimates.of(K, (0.05, 0.05))
    model = cast(ModelDrafter, SimulatedModel(machine))
    return AdaptiveDrafter(NGramDrafter(8, 1), model, estimates, clock=machine.clock)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("draft_ms", [0.3, 1.5, 4.0])
@pytest.mark.parametrize("slope", [0.02, 0.08, 0.25])
def test_speed_is_near_that_of_the_best_fixed_k(rate: float, draft_ms: float, slope: float) -> None:
    machine = Machine(slope, draft_ms)
    (speed,) = simulate(adaptive(machine), machine, (rate, 600))
    assert speed > 0.9 * best_fixed(machine, rate)


def test_where_no_draft_is_faster_it_tries_seldom() -> None:
    machine = Machine(0.3, 6.0)
    simulate(adaptive(machine), machine, (0.1, 400))
    tried = sum(width > 1 for width in machine.widths)
    assert 3 <= tried <= 30
    assert all(width == 1 for width in machine.widths[-20:]) or tried < 12


def test_a_text_that_changes_is_noticed() -> None:
    machine = Machine(0.05, 1.5)
    rates = (0.0, 1.0, 0.0, 1.0)
    speeds = simulate(adaptive(machine), machine, *((rate, num) for rate in rates for num in (150, 150)))
    for rate, speed in zip(rates, speeds[1::2], strict=True):
        assert speed > 0.9 * best_fixed(machine, rate)


def test_a_tuning_is_used_from_the_first_round() -> None:
    measured = {str(width): 10.0 * (1 + 0.05 * (width - 1)) for width in range(1, K + 2)}
    tuning = Tuning({}, "", measured, {"1": 0.5, "64": 3.0}, {MODEL: (0.95,) * K})
    machine = Machine(0.05, 0.5)
    estimates = OnlineEstimates.of(K, (0.5, 0.5), tuning.target_ms, tuning.draft_ms, tuning.acceptance)
    simulate(adaptive(machine, estimates), machine, (1.0, 20))
    assert machine.widths[:2] == [K + 1, K + 1]


def test_without_one_the_first_round_is_plain_and_the_second_drafts() -> None:
    machine = Machine(0.05, 0.5)
    simulate(adaptive(machine), machine, (1.0, 100))
    assert machine.widths[0] == 1 and machine.widths[1] > 1
    assert machine.widths[-1] == K + 1


def test_a_mixture_of_experts_begins_with_a_smaller_k() -> None:
    """Passes of one token take the same time, wider ones are not measured; those of a mixture read more experts."""
    experts = Experts(num_layers=1, num_experts=8, experts_per_token=2, bytes_per_expert=15)
    widths = {}
    for name, reads in (("dense", None), ("mixture", lambda width: experts.further_bytes(width) / 100)):
        measured = {"1": 10.0}, {"1": 1.0}, {MODEL: [0.7]}
        estimates = OnlineEstimates.of(K, (0.05, 0.05), *measured, further_reads=(reads, None))
        machine = Machine(0.05, 1.0)
        widths[name] = len(adaptive(machine, estimates).propose([1, 2, 3], K))
    assert 1 <= widths["mixture"] < widths["dense"]


def test_a_draft_model_that_cannot_pay_is_not_even_fed_the_prompt() -> None:
    estimates = OnlineEstimates.of(K, (0.05, 0.05), {"1": 10.0, "9": 30.0}, {"1": 9.0, "64": 30.0}, {MODEL: [0.2]})
    machine = Machine(0.25, 9.0)
    drafter = adaptive(machine, estimates)
    drafter.prefill(list(range(100, 600)))
    assert machine.now == 0
    good = OnlineEstimates.of(K, (0.05, 0.05), {"1": 10.0, "9": 14.0}, {"1": 1.0, "64": 5.0}, {MODEL: [0.9]})
    adaptive(machine, good).prefill(list(range(100, 600)))
    assert machine.now > 0


@pytest.mark.parametrize(("num_new", "is_fed"), [(8, False), (400, True)])
def test_a_long_prompt_is_fed_to_the_draft_only_if_the_answer_can_earn_it_back(num_new: int, is_fed: bool) -> None:
    """A draft that gains a little a token, and takes 500 tokens x 0.7 ms to begin with."""
    draft_ms = {"1": 2.0, "64": 46.0, "512": 360.0}
    estimates = OnlineEstimates.of(K, (0.05, 0.05), {"1": 10.0, "9": 14.0}, draft_ms, {MODEL: [0.8]})
    machine = Machine(0.05, 2.0)
    prompt = list(range(1000, 1500))
    model = cast(ModelDrafter, SimulatedModel(machine))
    drafter = AdaptiveDrafter(None, model, estimates, clock=machine.clock, end=len(prompt) + num_new)
    drafter.prefill(prompt[:-1])
    assert (machine.now > 0) == is_fed
    assert bool(drafter.propose(prompt, K)) == is_fed


@pytest.mark.parametrize(("rate", "is_fed"), [(0.80, False), (0.95, True)])
def test_a_long_prompt_is_not_fed_for_a_gain_within_the_error_of_the_estimates(rate: float, is_fed: bool) -> None:
    """An int4 target whose second row is free and whose third is not: K = 1 promises 1.04 times plain decoding."""
    target_ms = {str(width): 10.0 + 5.0 * max(0, width - 2) for width in range(1, K + 2)}
    estimates = OnlineEstimates.of(K, (0.05, 0.05), target_ms, {"1": 7.0, "64": 20.0, "512": 60.0}, {MODEL: [rate]})
    machine = Machine(0.05, 7.0)
    model = SimulatedModel(machine)
    drafter = AdaptiveDrafter(None, cast(ModelDrafter, model), estimates, clock=machine.clock, end=500)
    drafter.prefill(list(range(1000, 1100)))
    assert bool(model.calls) == is_fed


def test_one_text_on_which_a_draft_fails_does_not_end_its_use_on_the_next() -> None:
    """After a warm-up of a few tokens, a draft that must earn back its prefill was never tried again."""
    draft_ms = {"1": 1.5, "64": 33.0, "512": 260.0}
    target_ms = {str(width): 10.0 * (1 + 0.02 * (width - 1)) for width in range(1, K + 2)}
    estimates = OnlineEstimates.of(K, (0.02, 0.02), target_ms, draft_ms, {MODEL: [0.75]})
    machine = Machine(0.02, 1.5)
    simulate(adaptive(machine, estimates), machine, (0.0, 4))
    model = SimulatedModel(machine)
    drafter = AdaptiveDrafter(None, cast(ModelDrafter, model), estimates, clock=machine.clock, end=160)
    drafter.prefill(list(range(1000, 1100)))
    assert model.calls == [0]
    assert drafter.propose(list(range(1000, 1101)), K)


def test_nothing_is_tried_that_takes_longer_than_it_could_teach() -> None:
    """A model that does not pay and was left 2,000 tokens behind: to try it would cost what 200 plain rounds do."""
    estimates = OnlineEstimates.of(K, (0.05, 0.05), {"1": 10.0, "9": 30.0}, {"1": 9.0, "2000": 2000.0}, {MODEL: [0.2]})
    machine = Machine(0.25, 9.0)
    model = SimulatedModel(machine)
    drafter = AdaptiveDrafter(None, cast(ModelDrafter, model), estimates, clock=machine.clock, end=2200)
    tokens = list(range(1000, 3000))
    drafter.prefill(tokens[:-1])
    for _ in range(100):
        assert drafter.propose(tokens, K) == []
        machine.run_target(1)
        tokens.append(len(tokens))
        drafter.rollback(len(tokens))
    assert model.calls == []


def test_no_pass_is_thought_narrower_than_it_is() -> None:
    """With ``min_width`` 2 a plain round costs what a pass of two costs."""
    machine = Machine(0.05, 1.0)
    estimates = OnlineEstimates.of(K, (0.05, 0.05))
    drafter = AdaptiveDrafter(None, None, estimates, min_width=2, clock=machine.clock)
    drafter.propose([1, 2, 3], K)
    machine.now += 0.0105
    drafter.rollback(4)
    assert estimates.target.ms(2) == pytest.approx(10.5)


def test_a_lookup_is_taken_where_the_text_repeats_itself() -> None:
    """An n-gram draft costs nothing, so it goes before a model that is as good."""
    machine = Machine(0.05, 2.0)
    estimates = OnlineEstimates.of(K, (0.05, 0.05), {"1": 10.0, "9": 14.0}, {"1": 2.0}, {MODEL: [0.9]})
    drafter = adaptive(machine, estimates)
    repeated = [*range(50, 70), *range(50, 60)]
    assert drafter.propose(repeated, K) == [*range(60, 68)] and not drafter.is_sampled
    drafter.rollback(len(repeated) + K + 1)
    fresh = list(range(100, 140))
    assert set(drafter.propose(fresh, K)) == {0} and drafter.is_sampled


def test_a_model_whose_context_is_over_hides_no_lookup() -> None:
    """Also where its time is not known yet, so that it would be tried first."""
    machine = Machine(0.05, 1.0)
    estimates = OnlineEstimates.of(K, (0.05, 0.05), {"1": 10.0, "9": 14.0})
    model = cast(ModelDrafter, SimulatedModel(machine, context=8))
    drafter = AdaptiveDrafter(NGramDrafter(8, 1), model, estimates, clock=machine.clock)
    assert drafter.propose([*range(50, 70), *range(50, 60)], K) == [*range(60, 68)]
    drafter.rollback(39)
    assert drafter.propose(list(range(100, 140)), K) == []


def test_rounds_in_which_it_is_not_asked_teach_nothing() -> None:
    """The last token of an answer is decoded without asking for a draft."""
    machine = Machine(0.05, 1.0)
    estimates = OnlineEstimates.of(K, (0.05, 0.05))
    drafter = adaptive(machine, estimates)
    drafter.rollback(10)
    assert not estimates.target.is_known


@pytest.mark.parametrize("size", range(1, 12))
def test_every_suffix_has_a_source(size: int) -> None:
    length = int(ngram_source(size).removeprefix("ngram-"))
    assert length <= size and length in NGRAM_LENGTHS
    assert not any(length < other <= size for other in NGRAM_LENGTHS)
