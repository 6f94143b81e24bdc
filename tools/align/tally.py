"""How well a draft suits a target, position by position of the target's own text.

The target generates; then both models read that text once more, and the logits of every position are at hand. At
temperature 0 a drafted token is accepted where the draft's most likely id is the text's (an accepted prefix *is* the
text, so this holds at any place of a round). Above 0 the chance is taken as 1 - TV(p, q), of accepting
token by token; ``block`` accepts a few percent more. Rounds of any K follow from these chances without further passes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from specrt.engines.contract import LOGITS, UNDRAFTED
from specrt.engines.interface import Array
from specrt.runtime.drafting.drafters import NGramDrafter
from specrt.runtime.model import KVCachedModel
from specrt.runtime.round import Round
from specrt.tools.align.lookups import look_up


@dataclass
class Positions:
    """Results for each new token after the first: acceptance chances, TV and KL(p || q) in nats, and rejected ids.

    ``rejected`` counts (the draft's most likely id, the target's) where the two differ.
    """

    chances: list[float] = field(default_factory=list)
    tv: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    rejected: Counter[tuple[int, int]] = field(default_factory=Counter)


@dataclass
class Tally:
    """Rounds of one K over texts. ``reached[i]`` of them verified drafted token i, ``accepted[i]`` accepted it.

    ``by_drafted[n]`` counts rounds in which n tokens were drafted. Where chances are not 0 or 1, counts are
    expectations.
    """

    k: int
    tokens: int = 0
    reached: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    by_drafted: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def __post_init__(self) -> None:
        self.reached, self.accepted = [0.0] * self.k, [0.0] * self.k

    @property
    def rounds(self) -> float:
        return sum(self.by_drafted.values())

    @property
    def acceptance_by_position(self) -> list[float]:
        """The chance of each drafted token, given that those before it were accepted; ends where none was verified."""
        return [took / verified for took, verified in zip(self.accepted, self.reached, strict=True) if verified > 0]

    @property
    def mean_acceptance_length(self) -> float:
        return self.tokens / self.rounds if self.rounds else 1.0

    def speedup(self, target_ms: Sequence[float], draft_ms: float) -> float:
        """Speed-up over plain decoding; ``target_ms[w - 1]`` is a pass of w tokens, ``draft_ms`` one drafted token."""
        spent = sum(count * (n * draft_ms + target_ms[n]) for n, count in self.by_drafted.items())
        return self.tokens * target_ms[0] / spent if spent else 1.0

    def add(self, chances: Sequence[float]) -> None:
        """Add one text of a draft model. Positions where rounds may start are weighted by the chance that they do."""
        starts = np.zeros(len(chances) + self.k + 2)  # [tokens + ...] chance that a round starts there
        starts[0] = 1.0
        for place in range(len(chances)):
            weight = float(starts[place])
            if weight == 0:
                continue
            drafted = min(self.k, len(chances) - place - 1)
            self.by_drafted[drafted] += weight
            for i in range(drafted):
                took = weight * chances[place + i]
                self.reached[i] += weight
                self.accepted[i] += took
                starts[place + i + 1] += weight - took
                weight = took
            starts[place + drafted + 1] += weight
        self.tokens += len(chances)

    def add_rounds(self, rounds: Iterable[Round]) -> None:
        """Add the rounds of one text, as they ran."""
        for done in rounds:
            if done.is_prefill:
                continue
            num_drafted = len(done.drafted)
            for i in range(min(num_drafted, done.num_accepted + 1)):
                self.reached[i] += 1
                self.accepted[i] += i < done.num_accepted
            self.by_drafted[num_drafted] += 1
            self.tokens += len(done.emitted)

    def add_ngram(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Add one text of n-gram drafts, round by round. ``output`` is the target's, with the token of the prefill."""
        drafter, tokens, place = NGramDrafter(), [*prompt, *output], len(prompt) + 1
        while place < len(tokens):
            found = look_up(drafter, tokens, place, min(self.k, len(tokens) - place - 1))
            for i in range(min(found.num_drafted, found.num_accepted + 1)):
                self.reached[i] += 1
                self.accepted[i] += i < found.num_accepted
            self.by_drafted[found.num_drafted] += 1
            place += found.num_accepted + 1
        self.tokens += max(0, len(output) - 1)


def rows_of(model: KVCachedModel, tokens: Sequence[int], first: int) -> Iterable[Array]:
    """Logits [V] after ``tokens[:i]`` for i = first ... len(tokens) - 1, each of which predicts token i.

    A head reads the features of a target that is asked for each row before it.
    """
    tokens, first = tokens[model.offset :], first - model.offset
    model.rollback(0)
    model.prefill(tokens[: first - 1])
    fed = first - 1
    while fed < len(tokens) - 1:
        num = min(model.spec.max_rows, len(tokens) - 1 - fed)
        model.feed(tokens[fed : fed + num], num)
        yield from model.read(LOGITS)[0][:num].copy()  # [num, V]
        fed += num


def compare_rows(
    target: KVCachedModel, draft: KVCachedModel, prompt: Sequence[int], output: Sequence[int], temperature: float
) -> Positions:
    """Read one text with both models. TV and KL are at ``temperature``, at 1 where it is 0."""
    found, tokens = Positions(), [*prompt, *output]
    first = len(prompt) + 1
    rows = zip(tokens[first:], rows_of(target, tokens, first), rows_of(draft, tokens, first), strict=True)
    for token, target_row, draft_row in rows:
        size = min(len(target_row), len(draft_row))
        known = np.flatnonzero(draft_row[:size] > UNDRAFTED)  # the ids that the draft can propose
        log_p = log_softmax(target_row[:size], temperature or 1.0)[known]
        log_q = log_softmax(draft_row[known], temperature or 1.0)
        p = np.exp(log_p)
        tv = float(np.maximum(np.exp(log_q) - p, 0).sum())  # q is 0 for other ids
        wanted, got = int(target_row.argmax()) if temperature else token, int(draft_row.argmax())
        found.tv.append(tv)
        found.kl.append(float((p * (log_p - log_q)).sum()))
        found.chances.append(1 - tv if temperature else float(got == wanted))
        if got != wanted:
            found.rejected[got, wanted] += 1
    return found


def log_softmax(logits: Array, temperature: float) -> Array:
    """[V] f64"""
    scaled = logits.astype(np.float64) / temperature
    scaled -= scaled.max()
    shifted: Array = scaled - np.log(np.exp(scaled).sum())
    return shifted
