"""Training in bf16: gradients near those of fp32, the target's distribution and evaluations equal to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specrt.exporter.cutting import keep_layers
from specrt.exporter.training import learners, precision
from specrt.exporter.training.batches import Batch, Batches, Packing
from specrt.exporter.training.learners import HeadLearner, LayersLearner, Learner, new_head
from specrt.exporter.training.loss import Agreement, Wanted, draft_loss
from specrt.exporter.training.vocabulary import choose_ids
from tests.exporter.training.tiny_training import VARIANT, small_text, tiny_target, write_tiny_text

DTYPES = torch.float32, torch.bfloat16


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Batch:
    store = write_tiny_text(tmp_path_factory.mktemp("text"), tiny_target(), small_text())
    found = Batches(store, Packing.of(store, 256), 0, torch.device("cpu")).batch(0, 0)
    assert found is not None
    return found


@pytest.fixture(params=["head", "layers"])
def learner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Learner]:
    target = tiny_target()
    if request.param == "layers":
        model = tiny_target().model
        keep_layers(model, [0, 6])  # with all layers there is nothing to learn
        yield LayersLearner(model, target)
        return
    store = write_tiny_text(tmp_path, target, small_text())
    vocabulary = choose_ids(store, target.vocab_size, 128, 1, 10_000)
    head = new_head(target, vocabulary, VARIANT, 0)
    yield HeadLearner(head, target, torch.from_numpy(vocabulary.ids), 3, 0.8)


def use(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (learners, precision):
        monkeypatch.setattr(module, "matmul_dtype", lambda device: dtype)


def gradient(learner: Learner, batch: Batch) -> torch.Tensor:
    learner.module.zero_grad()
    loss = learner.loss(batch, "kl", [Agreement() for _ in range(learner.depth)])
    assert loss is not None and loss.dtype == torch.float32
    loss.backward()
    found = [p.grad for p in learner.module.parameters() if p.requires_grad]
    assert all(values is not None and values.dtype == torch.float32 for values in found)
    return torch.cat([values.flatten() for values in found if values is not None])


def measured(learner: Learner, batch: Batch) -> list[float]:
    agreements = [Agreement() for _ in range(learner.depth)]
    learner.measure(batch, agreements)
    return [agreement.accepted for agreement in agreements]


def test_gradients_are_near_those_of_fp32_and_evaluations_equal(
    learner: Learner, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients, evaluations = [], []
    for dtype in DTYPES:
        use(dtype, monkeypatch)
        gradients.append(gradient(learner, batch))
        evaluations.append(measured(learner, batch))
    exact, rounded = gradients
    assert not torch.equal(exact, rounded)  # bf16 was used
    assert torch.cosine_similarity(exact, rounded, dim=0) > 0.995
    assert evaluations[0] == evaluations[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_targets_distribution_is_not_rounded(dtype: torch.dtype) -> None:
    """A draft of zeros has the same q in every dtype, so that its acceptance shows the rounding of p alone."""
    torch.manual_seed(0)
    last, lm_head = torch.randn(9, 6), torch.randn(11, 6)
    wanted = Wanted(last, (last @ lm_head.T).logsumexp(-1), lm_head, torch.zeros(9, dtype=torch.int64))
    agreement, hidden = Agreement(), torch.zeros(9, 6, requires_grad=True)
    draft_loss(hidden, torch.randn(11, 6), wanted, "kl", agreement, torch.arange(11), dtype)
    p = (last @ lm_head.T).softmax(-1)
    assert agreement.accepted == pytest.approx(float(p.clamp(max=1 / 11).sum()), rel=1e-6)
    coarse = (last.bfloat16() @ lm_head.bfloat16().T).float().softmax(-1)  # the control
    assert agreement.accepted != pytest.approx(float(coarse.clamp(max=1 / 11).sum()), rel=1e-6)
