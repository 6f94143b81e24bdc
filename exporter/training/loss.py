"""Losses of a draft against the target's distribution, and the expected acceptance, a chunk of rows at a time.

p is the target's distribution over all ids, q the draft's over the ids that it drafts. For an id that is not drafted,
q is 0. The chance that a sampled draft is accepted is the sum of min(p, q) over the drafted ids (arXiv 2211.17192).
Logits of a chunk stay in the cache of the processor: the gradients, which have a closed form, are computed from them at
once, and no [N, D] matrix is kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

Objective = Literal["kl", "acceptance"]
CHUNK = 256
_LEAST = 1e-6  # of an acceptance whose logarithm is taken
_LEAST_LOG = -100.0  # of q, in the value of the loss


@dataclass(frozen=True)
class Wanted:
    """The target at N positions. ``last`` [N, H] is what its lm_head reads, ``normalizer`` [N] f32 the logsumexp of all
    of its logits, ``lm_head`` [D, H] its rows of the drafted ids, ``top`` [N] i64 its most likely id.
    """

    last: torch.Tensor
    normalizer: torch.Tensor
    lm_head: torch.Tensor
    top: torch.Tensor

    def log_p(self, part: slice) -> torch.Tensor:
        """[n, D] f32"""
        return (self.last[part] @ self.lm_head.T).float().sub_(self.normalizer[part, None])

    def __len__(self) -> int:
        return len(self.last)


@dataclass
class Agreement:
    """Sums over positions of a step: of the expected acceptance, and of equal argmaxes."""

    accepted: float = 0.0
    same: float = 0.0
    num: int = 0

    def add(self, accepted: torch.Tensor, same: torch.Tensor) -> None:
        self.accepted += float(accepted.sum())
        self.same += float(same.sum())
        self.num += len(accepted)


def rows_loss(
    logits: torch.Tensor, log_p: torch.Tensor, objective: Objective
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss [n], its gradient by logits [n, D], acceptance [n]) for logits and ``log_p`` [n, D], which may be -inf.

    ``kl``: the sum of p (log p - log q) over the drafted ids. ``acceptance``: -log of the sum of min(p, q).
    """
    log_q = torch.log_softmax(logits, dim=-1)
    p, q = log_p.exp(), log_q.exp()
    accepted = torch.minimum(p, q).sum(-1)  # [n]
    if objective == "kl":
        ratio = torch.where(p > 0, log_p - log_q.clamp(min=_LEAST_LOG), torch.zeros_like(p))
        gradient = q.mul_(p.sum(-1, keepdim=True)).sub_(p)
        return (p * ratio).sum(-1), gradient, accepted
    below = torch.where(q < p, q, torch.zeros_like(q))  # dA/dq is 1 here
    total = accepted.clamp(min=_LEAST)
    gradient = q.mul_(below.sum(-1, keepdim=True)).sub_(below).div_(total[:, None])
    return -total.log(), gradient, accepted


def _chunks(
    hidden: torch.Tensor, weight: torch.Tensor, wanted: Wanted, ids: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """The rows of each chunk, the draft's logits [n, D] f32 there, and whether its argmax is the target's [n]."""
    for start in range(0, len(wanted), CHUNK):
        part = slice(start, start + CHUNK)
        logits = (hidden[part] @ weight.T).float()
        yield part, logits, ids[logits.argmax(-1)] == wanted.top[part]


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        wanted: Wanted,
        objective: Objective,
        agreement: Agreement,
        ids: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        num = len(wanted)
        rounded, weights = hidden.to(dtype), weight.to(dtype)
        by_hidden = torch.empty_like(hidden)
        by_weight = torch.zeros_like(weight) if weight.requires_grad else None
        total = hidden.new_zeros((), dtype=torch.float32)
        for part, logits, agrees in _chunks(rounded, weights, wanted, ids):
            loss, gradient, accepted = rows_loss(logits, wanted.log_p(part), objective)
            agreement.add(accepted, agrees)
            total += loss.sum()
            gradient = gradient.div_(num).to(dtype)
            by_hidden[part] = gradient @ weights
            if by_weight is not None:
                by_weight += gradient.T @ rounded[part]
        ctx.save_for_backward(by_hidden, *([] if by_weight is None else [by_weight]))
        return total / num

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        by_hidden, *rest = ctx.saved_tensors
        by_weight = rest[0] * outer[0] if rest else None
        return by_hidden * outer[0], by_weight, None, None, None, None, None


def draft_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    wanted: Wanted,
    objective: Objective,
    agreement: Agreement,
    ids: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Mean loss of N rows: ``hidden`` [N, H] times ``weight`` [D, H] are the draft's logits of the ids ``ids`` [D].

    Matmuls of the draft's logits and of gradients round their inputs to ``dtype``; those of the target's logits do not.
    Adds the acceptance and the equal argmaxes of the rows to ``agreement``.
    """
    apply: Callable[..., torch.Tensor] = _DraftLoss.apply
    found = apply(hidden, weight, wanted, objective, agreement, ids, dtype)
    return found


def agree(hidden: torch.Tensor, weight: torch.Tensor, wanted: Wanted, agreement: Agreement, ids: torch.Tensor) -> None:
    """Add acceptance and equal argmaxes to ``agreement``, without a loss."""
    for part, logits, agrees in _chunks(hidden, weight, wanted, ids):
        accepted = torch.minimum(wanted.log_p(part).exp(), logits.softmax(-1)).sum(-1)
        agreement.add(accepted, agrees)
