"""How well each variant of a head predicts a text that the target wrote.

Chains of three steps start at every position: the first reads the target's feature, the others the head's own hidden
state. All of them are fed the text's own tokens, so that a step is not judged by the one before it. Variants are
compared by the log-likelihood of the target's choices, which is what heads are trained on: it separates variants that
agree with the target equally often. Agreement is what is printed, and what has to be above chance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from specrt.exporter.heads.config import FcNorm, HeadVariant, default_taps
from specrt.exporter.heads.files import LoadedHead, build_head
from specrt.exporter.heads.tensors import stored_norms
from specrt.exporter.heads.unroll import unroll

NUM_STEPS = 3
CHANCE = 1e-6  # the probability that a predictor without knowledge passes, over all candidates together
_SHARE = 0.5  # a candidate with less than this share of the best agreement at step 1 is not scored further
_FLOOR = -8.0  # of a log-likelihood, in nats: a few positions do not decide


@dataclass(frozen=True)
class Text:
    """Ids [N] i64, the target's greedy choice after each [N] i64, and its hidden states, as transformers numbers them.

    ``hidden_states[i]`` is [N, Ht], for i from 0 to the number of layers - 1 at least. The first ``num_prompt`` ids are
    not the target's, and no prediction of them counts.
    """

    ids: torch.Tensor
    choices: torch.Tensor
    hidden_states: Sequence[torch.Tensor]
    num_prompt: int = 0

    @property
    def chains(self) -> slice:
        """The positions that a chain starts at: all steps predict ids that the target wrote."""
        return slice(max(0, self.num_prompt - 2), len(self.ids) - NUM_STEPS)


@dataclass(frozen=True)
class Score:
    """The agreement of ``variant`` with the target's choices.

    ``agreed`` [steps, chains] bool, and ``likelihood`` [steps, chains] f32 in nats, at least -8 each; one step only for
    a candidate that was given up after it.
    """

    variant: HeadVariant
    agreed: torch.Tensor
    likelihood: torch.Tensor

    @property
    def counts(self) -> list[int]:
        """How many chains agree at each step."""
        return [int(step.sum()) for step in self.agreed]

    @property
    def num_chains(self) -> int:
        """How many chains there are."""
        return self.agreed.shape[1]

    @property
    def is_complete(self) -> bool:
        """Whether all steps were scored."""
        return len(self.agreed) == NUM_STEPS

    @property
    def mean_accepted(self) -> float:
        """The mean number of steps that agree before the first that does not."""
        return float(self.agreed.int().cumprod(0).sum() / self.num_chains)

    @property
    def mean_likelihood(self) -> float:
        """Of a step, in nats."""
        return float(self.likelihood.mean())

    def lead(self, other: Score) -> float:
        """By how many standard errors the text is likelier under this one than under ``other``. Both are complete."""
        difference = (self.likelihood.sum(0) - other.likelihood.sum(0)).double()
        spread = float(difference.square().sum().sqrt())
        return float(difference.sum()) / spread if spread else 0.0


@dataclass(frozen=True)
class Chance:
    """What a predictor without knowledge reaches at step 1: always the most frequent id, or the last id again.

    It has ``needed`` agreements of ``total`` or more with a probability below 1e-6, over all candidates together, by
    the binomial distribution with ``rate``.
    """

    rate: float
    needed: int
    total: int

    def __str__(self) -> str:
        return (
            f"above chance: at least {self.needed} of {self.total} at step 1; the best constant or repeating predictor "
            f"has {self.rate:.1%}, binomial bound at {CHANCE:g}"
        )


def candidate_variants(head: LoadedHead, num_layers: int) -> list[HeadVariant]:
    """The stated variant first, then the others: taps by one up or down or the default ones, norms, rotation.

    The norms before ``fc`` are those whose tensors the files hold, or none.
    """
    stated = head.stated
    shifted = [tuple(tap + by for tap in stated.taps) for by in (0, 1, -1)]
    taps = [t for t in (*shifted, default_taps(num_layers)) if min(t) >= 0 and max(t) < num_layers]
    taps = [t for t in taps if len(set(t)) == len(t)]
    norms: tuple[FcNorm, ...] = (stated.fc_norm, stored_norms(head.tensors), "none")
    thetas: list[float | None] = [None]
    if head.trained_theta not in (None, head.config.layer.rope_parameters["rope_theta"]):
        thetas.append(head.trained_theta)
    rows = product(taps, norms, (False, True), (False, True), thetas)
    return list(dict.fromkeys([stated, *(HeadVariant(*row) for row in rows)]))


@torch.no_grad()
def score_variants(
    head: LoadedHead, texts: Sequence[Text], target_embedding: torch.Tensor, variants: Sequence[HeadVariant]
) -> list[Score]:
    """The scores of ``variants``, best first, and equal ones in their order. ``target_embedding`` [V, Ht]."""
    runs = [(variant, _steps(head, variant, texts, target_embedding)) for variant in variants]
    first = [(variant, rest, next(rest)) for variant, rest in runs]
    best = max(int(agreed.sum()) for _, _, (agreed, _) in first)
    scores = []
    for variant, rest, (agreed, likelihood) in first:
        is_kept = variant == head.stated or int(agreed.sum()) >= _SHARE * best
        steps = [(agreed, likelihood), *(rest if is_kept else ())]
        scores.append(Score(variant, *(torch.stack(rows) for rows in zip(*steps, strict=True))))
    return sorted(scores, key=lambda score: (-len(score.agreed), -score.mean_likelihood))


def _steps(
    head: LoadedHead, variant: HeadVariant, texts: Sequence[Text], target_embedding: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(whether the head's choice is the target's, log-likelihood of the target's choice), [chains] each, by step."""
    module = build_head(head.config.with_variant(variant), head.tensors, target_embedding)
    columns = torch.full((head.config.vocab_size,), -1)
    columns[module.d2t + torch.arange(len(module.d2t))] = torch.arange(len(module.d2t))
    features = [module.fuse(torch.cat([text.hidden_states[tap] for tap in variant.taps], -1).float()) for text in texts]
    chains = [unroll(module, t.ids[None], f[None], NUM_STEPS) for t, f in zip(texts, features, strict=True)]
    for step in range(1, NUM_STEPS + 1):
        rows = torch.cat([next(chain)[0, text.chains] for text, chain in zip(texts, chains, strict=True)])
        wanted = columns[torch.cat([text.choices[step:][text.chains] for text in texts])]
        logits = module.logits(rows).log_softmax(-1)
        likelihood = logits.gather(-1, wanted.clamp(min=0)[:, None])[:, 0].clamp(min=_FLOOR)
        yield logits.argmax(-1) == wanted, torch.where(wanted < 0, _FLOOR, likelihood)


def chance_of(texts: Sequence[Text], num_candidates: int) -> Chance:
    """The bound that a head has to pass on ``texts``."""
    choices = torch.cat([text.choices[1:][text.chains] for text in texts])
    last = torch.cat([text.ids[1:][text.chains] for text in texts])
    total = len(choices)
    constant = Counter(choices.tolist()).most_common(1)[0][1]
    rate = max(constant, int((choices == last).sum())) / total
    return Chance(rate, _binomial_bound(total, rate, CHANCE / num_candidates), total)


def _binomial_bound(total: int, rate: float, probability: float) -> int:
    """The smallest k for which ``total`` trials of ``rate`` have k successes or more with less than ``probability``."""
    rate, tail = min(rate, 1 - 1e-12), 0.0
    for k in range(total, 0, -1):
        log_ways = math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1)
        tail += math.exp(log_ways + k * math.log(rate) + (total - k) * math.log1p(-rate))
        if tail >= probability:
            return k + 1
    return 1
