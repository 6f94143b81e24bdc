"""The losses' own gradients against autograd, with -inf, and in chunks."""

from __future__ import annotations

import pytest
import torch

from specrt.exporter.training import loss as losses
from specrt.exporter.training.loss import Agreement, Objective, Wanted, agree, draft_loss, rows_loss

OBJECTIVES: tuple[Objective, ...] = ("kl", "acceptance")


def plain_loss(logits: torch.Tensor, log_p: torch.Tensor, objective: Objective) -> torch.Tensor:
    log_q, p = logits.log_softmax(-1), log_p.exp()
    if objective == "kl":
        return (p * (log_p - log_q)).sum(-1)
    return -torch.minimum(p, log_q.exp()).sum(-1).log()


def example(rows: int = 7, ids: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    wider = torch.randn(rows, ids + 5) * 2  # some of the target's ids are not drafted
    return torch.randn(rows, ids) * 2, wider.log_softmax(-1)[:, :ids]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gradients_are_those_of_autograd(objective: Objective) -> None:
    logits, log_p = example()
    logits.requires_grad_(True)
    expected = plain_loss(logits, log_p, objective)
    expected.sum().backward()
    found, gradient, accepted = rows_loss(logits.detach(), log_p, objective)
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(gradient, logits.grad)
    torch.testing.assert_close(accepted, torch.minimum(log_p.exp(), logits.detach().softmax(-1)).sum(-1))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_infinite_logits_give_finite_losses_and_gradients(objective: Objective) -> None:
    logits, log_p = example()
    log_p[:, 3], log_p[0] = float("-inf"), float("-inf")  # an id, and all ids of a row, that the target never says
    logits[:, 4] = float("-inf")
    found, gradient, accepted = rows_loss(logits, log_p, objective)
    assert all(bool(torch.isfinite(values).all()) for values in (found, gradient, accepted))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_chunks_of_rows_give_the_gradients_of_the_whole(objective: Objective, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK", 4)
    torch.manual_seed(2)
    hidden, weight = (torch.randn(rows, 6, requires_grad=True) for rows in (10, 9))
    last, lm_head = torch.randn(10, 6), torch.randn(9, 6)
    normalizer = (last @ lm_head.T).logsumexp(-1) + 0.3
    ids, top = torch.arange(9) * 2, torch.arange(10)
    wanted, agreement = Wanted(last, normalizer, lm_head, top), Agreement()
    found = draft_loss(hidden, weight, wanted, objective, agreement, ids)
    (found * 3).backward()
    got = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    logits = hidden @ weight.T
    log_p = last @ lm_head.T - normalizer[:, None]
    (plain_loss(logits, log_p, objective).mean() * 3).backward()
    torch.testing.assert_close(got, (hidden.grad, weight.grad))
    again = Agreement()
    agree(hidden.detach(), weight.detach(), wanted, again, ids)
    assert again.num == agreement.num == 10
    assert again.accepted == pytest.approx(agreement.accepted)
    assert again.same == agreement.same == float((ids[logits.argmax(-1)] == top).sum())
