"""The statistical check of ``specrt verify``: first tokens of many rounds follow the target's own distribution.

The rounds run on the bundle's own samplers, with logits of its own models; only the passes of the models are run once
and reused. Controls with a deliberate fault go through the same test, which must reject them. A test that cannot fail
would prove nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specrt.engines.contract import INPUT_IDS, LOGITS, NUM_ACCEPTED, ROW_INDICES, TOKENS
from specrt.engines.interface import Array
from specrt.engines.numpy_samplers import block_chances, draw, filtered
from specrt.engines.samplers import BLOCK, CHUNK, DRAFT_PROBS, PROBS, UNIFORMS, WITHIN
from specrt.runtime.sampling.uniforms import DRAFT, VERIFY, Uniforms
from specrt.runtime.slots import Slot, SlotModel
from specrt.tools.verify.checks import Check, Subject

ALPHA = 1e-4
TEMPERATURE, TOP_K = 1.0, 8
HOT = 2.0  # the stand-in's temperature, where the bundle has no draft model that differs from its target
MIN_SENSITIVITY = 0.1  # in total variation: with less, the bundle's own draft is too good to show a fault
MAX_DRAWS = 20_000
SEED = 29


def p_value(counts: Array, probs: Array) -> float:
    """The p-value of a chi-square test of ``counts`` [V] against ``probs`` [V]; expected counts below 5 are pooled.

    By the cube-root approximation of Wilson and Hilferty (1931). An id of probability 0 that was drawn gives 0.
    """
    expected = probs.astype(np.float64) / probs.sum(dtype=np.float64) * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    large = expected >= 5
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    degrees = len(wanted) - 1
    if degrees < 1:
        return 1.0
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


@dataclass
class Rounds:
    """Rounds of ``k`` = 1 or 2 after one prefix: p and q of the first position, and of the second by first id.

    [V] f32 each. For a third row, on which the first token does not depend, the second one's p is used.
    """

    slot: Slot
    p: Array
    q: Array
    p_after: dict[int, Array]
    q_after: dict[int, Array]
    is_stand_in: bool
    k: int

    @cached_property
    def distance(self) -> float:
        """The total variation between p and q, which verification has to correct."""
        return _variation(self.p, self.q)

    @cached_property
    def controls(self) -> dict[str, tuple[Array, Array]]:
        """The p and q given to the sampler, by the name of the fault."""
        return {
            "no verification": (self.q, self.q),
            "a row off by one": (self.p_after[int(self.q.argmax())], self.q),
            "q at another temperature": (self.p, max(_other_temperatures(self.q), key=self._harm)),
        }

    @cached_property
    def sensitivity(self) -> float:
        """The smallest total variation between p and the distribution of a control: how easily the test can distinguish
        them apart.
        """
        return min(_variation(self.p, self.distribution(*given)) for given in self.controls.values())

    def distribution(self, p: Array, q: Array) -> Array:
        """Of the first token under ``block``, when the rule is given ``p`` and ``q`` for the first position. [V]"""
        accepted = np.zeros_like(self.p)
        for x1 in np.flatnonzero(self.q).tolist():
            p_rows, q_rows = np.asarray([p, self.p_after[x1], self.p_after[x1]]), np.asarray([q, self.q_after[x1]])
            for x2 in np.flatnonzero(self.q_after[x1]).tolist() if self.k > 1 else [x1]:
                chances = block_chances(p_rows[: self.k + 1], q_rows[: self.k], (x1, x2)[: self.k])
                weight = self.q_after[x1][x2] if self.k > 1 else 1
                accepted[x1] += self.q[x1] * weight * (1 - np.prod(1 - chances))
        residual = np.maximum(p - q, 0)
        mass = residual.sum()
        found: Array = accepted + (1 - accepted.sum()) * (residual / mass if mass > 0 else p)
        return found

    def _harm(self, q: Array) -> float:
        """How far the first token's distribution is from p when the rule is given ``q``."""
        return _variation(self.p, self.distribution(self.p, q))

    def enough_draws(self, num_draws: int) -> int:
        """``num_draws``, or the number that almost surely rejects each control (noncentrality 4 n TV^2 >= 100)."""
        return min(MAX_DRAWS, max(num_draws, math.ceil(25 / self.sensitivity**2)))

    def first_tokens(self, num_draws: int, given: tuple[Array, Array] | None = None) -> Array:
        """How often each id came first, verified by the bundle's sampler ``block``. [V] i64

        ``given`` replaces what the sampler is given as p and q at the first position, for controls.
        """
        samplers = self.slot.target.samplers
        sampler, host = samplers.sampler(BLOCK), samplers.host
        given = given or (self.p, self.q)
        rows = self.k + 1
        host[INPUT_IDS][0, 0], host[ROW_INDICES][:rows] = 0, range(rows)
        sampler.upload(ROW_INDICES)
        counts = np.zeros(len(self.p), np.int64)
        uniforms, loaded = Uniforms(SEED), -1
        for index in range(num_draws):
            drafted = uniforms.of_round(DRAFT, index, 2)
            x1 = draw(self.q, drafted[0, CHUNK], drafted[0, WITHIN])
            x2 = draw(self.q_after[x1], drafted[1, CHUNK], drafted[1, WITHIN])
            if loaded != x1:
                sampler.write(PROBS, np.asarray([given[0], self.p_after[x1], self.p_after[x1]][:rows]))
                sampler.write(DRAFT_PROBS, np.asarray([given[1], self.q_after[x1]][: self.k]))
                loaded = x1
            host[INPUT_IDS][0, 1:rows] = (x1, x2)[: self.k]
            host[UNIFORMS][:rows] = uniforms.of_round(VERIFY, index, rows)
            sampler.upload(INPUT_IDS, UNIFORMS)
            sampler.run(rows, rows)
            accepted, tokens = sampler.read(NUM_ACCEPTED, TOKENS)
            counts[x1 if accepted[0] else tokens[0]] += 1
        return counts


def check_first_tokens(subject: Subject) -> list[Check]:
    """``block`` against the target's distribution; three controls that must be rejected."""
    has_draft = subject.runtime.manifest.draft.kind == "model"
    slot = subject.runtime.open_slot("model" if has_draft else "none")
    rounds = _most_sensitive(subject, slot)
    num_draws = rounds.enough_draws(subject.num_draws)
    drafts = f"a stand-in draft (the target at T = {HOT:g})" if rounds.is_stand_in else "the draft"
    value = p_value(rounds.first_tokens(num_draws), rounds.p)
    found = [
        Check(
            f"chi-square: {BLOCK}",
            f"{num_draws} first tokens with the target's distribution "
            f"(T = {TEMPERATURE:g}, top-k {TOP_K}); TV of {drafts} to it {rounds.distance:.2f}",
            f"p = {value:.2g}",
            value > ALPHA,
            {"p_value": value, "total_variation": rounds.distance},
        )
    ]
    for name, given in rounds.controls.items():
        value = p_value(rounds.first_tokens(num_draws, given), rounds.p)
        found.append(
            Check(
                f"control: {name}",
                "the same test on rounds with this fault, which it must reject",
                f"p = {value:.2g}, {'rejected' if value <= ALPHA else 'not noticed'}",
                value <= ALPHA,
                {"p_value": value},
            )
        )
    slot.close()
    return found


def _most_sensitive(subject: Subject, slot: Slot) -> Rounds:
    """Rounds of the prompt that shows faults most clearly, with the bundle's draft or else with the stand-in.

    Where draft and target agree completely, or not at all, no fault could be detected.
    """

    def best(is_stand_in: bool) -> Rounds:
        found = (_rounds(slot, prompt, is_stand_in, min(2, subject.k)) for prompt in subject.prompts)
        return max(found, key=lambda rounds: rounds.sensitivity)

    if slot.draft is not None and (rounds := best(is_stand_in=False)).sensitivity >= MIN_SENSITIVITY:
        return rounds
    return best(is_stand_in=True)


def _rounds(slot: Slot, prompt: Sequence[int], is_stand_in: bool, k: int) -> Rounds:
    """Run both models after ``prompt`` and after each id that may follow it."""
    p, q = _probs(slot, prompt, is_stand_in)
    after = {int(x): _probs(slot, [*prompt, int(x)], is_stand_in) for x in np.flatnonzero(q)}
    p_after, q_after = ({x: pair[side] for x, pair in after.items()} for side in (0, 1))
    return Rounds(slot, p, q, p_after, q_after, is_stand_in, k)


def _probs(slot: Slot, tokens: Sequence[int], is_stand_in: bool) -> tuple[Array, Array]:
    """p and q after ``tokens``, [V] f32 each."""
    target = _logits(slot.target, tokens)
    vocab_size = target.shape[1]
    p = filtered(target, TEMPERATURE, TOP_K)[0]
    if is_stand_in or slot.draft is None:
        return p, filtered(target, HOT, TOP_K)[0]
    q = filtered(_logits(slot.draft, tokens)[:, :vocab_size], TEMPERATURE, TOP_K)[0]
    return p, np.pad(q, (0, vocab_size - len(q)))


def _logits(part: SlotModel, tokens: Sequence[int]) -> Array:
    """[1, V] f32 after ``tokens``. A head reads the features of the target, which is asked first."""
    part.begin(tokens, min_width=1)
    part.model.feed(part.model.missing(tokens), 1)
    return part.model.read(LOGITS)[0][:1]


def _variation(p: Array, q: Array) -> float:
    return float(np.abs(p - q).sum() / 2)


def _other_temperatures(q: Array) -> list[Array]:
    """``q`` at twice and at half its temperature."""
    found = []
    for weights in (np.sqrt(q), q**2):
        changed: Array = (weights / weights.sum()).astype(np.float32)
        found.append(changed)
    return found
