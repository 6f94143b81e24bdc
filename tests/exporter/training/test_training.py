"""A head learns on a tiny target; a run that is stopped and continued ends like one that was not."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specrt.engines.errors import ResourceError, UsageError
from specrt.engines.progress import Silent
from specrt.exporter.training.batches import Batches, Packing
from specrt.exporter.training.learners import HeadLearner, new_head
from specrt.exporter.training.loss import Agreement
from specrt.exporter.training.recipe import TextRecipe, TrainRecipe
from specrt.exporter.training.run import claim, train_head, train_layers
from specrt.exporter.training.store import Store
from specrt.exporter.training.target import TrainingTarget
from specrt.exporter.training.trainer import CHECKPOINT, Trainer, rate_at
from specrt.exporter.training.vocabulary import choose_ids
from tests.exporter.training.tiny_training import VARIANT, small_text, tiny_target, write_tiny_text


@pytest.fixture(scope="module")
def target() -> TrainingTarget:
    return tiny_target()


@pytest.fixture(scope="module")
def store(target: TrainingTarget, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_tiny_text(tmp_path_factory.mktemp("text"), target, small_text(9000, num_lanes=48))


def recipe(num_steps: int) -> TrainRecipe:
    return TrainRecipe(minutes=None, num_steps=num_steps, tokens_per_step=256, num_evaluations=3, max_rate=5e-3)


def trainer(target: TrainingTarget, store: Store, num_steps: int, folder: Path) -> Trainer:
    vocabulary = choose_ids(store, target.vocab_size, 128, 1, 10_000)
    head = new_head(target, vocabulary, VARIANT, 0)
    learner = HeadLearner(head, target, torch.from_numpy(vocabulary.ids), 3, 0.8)
    batches = Batches(store, Packing.of(store, 256), 0, torch.device("cpu"))
    folder.mkdir(exist_ok=True)
    return Trainer(learner, batches, recipe(num_steps), folder, held_out_tokens=12_000)


def test_a_trained_head_beats_the_untrained_one(target: TrainingTarget, store: Store, tmp_path: Path) -> None:
    """The share of equal ids at each step rises by more than 5 standard deviations of a binomial (p < 1e-6)."""
    trained = train_head(target, store, recipe(60), tmp_path)
    first, best = trained.state.history[0], trained.state.best
    assert best is not None
    num = sum(entry.num_tokens - entry.first_scored - 2 for entry in store.chosen(True))  # positions of the last step
    for before, after in zip(first.same, best.same, strict=True):
        assert after - before > 5 * sqrt((before * (1 - before) + after * (1 - after)) / num)
    assert all(after > 1.5 * before for before, after in zip(first.accepted, best.accepted, strict=True))


@pytest.mark.slow
def test_three_minutes_teach_a_head_most_of_a_tiny_target(target: TrainingTarget, tmp_path: Path) -> None:
    """By the clock: 30 s of text and 2.5 minutes of training; greedy agreement of the first token above 60 %."""
    text = TextRecipe(minutes=0.5, num_lanes=64, max_prompt_tokens=6, max_answer_tokens=24)
    store = write_tiny_text(tmp_path / "text", target, text)
    wanted = TrainRecipe(minutes=2.5, tokens_per_step=1024, max_rate=5e-3)
    trained = train_head(target, store, wanted, tmp_path)
    best = trained.state.best
    assert best is not None and best.same[0] > 0.6
    assert 150 <= trained.state.seconds < 170


def test_a_copy_of_some_layers_learns(target: TrainingTarget, store: Store, tmp_path: Path) -> None:
    before = copy.deepcopy(target.model.state_dict())
    trained = train_layers(target, store, recipe(30), tmp_path, 2)
    best = trained.state.best
    assert best is not None and best.accepted[0] > trained.state.history[0].accepted[0] + 0.02
    assert trained.learner.module.config.num_hidden_layers == 2  # type: ignore[union-attr]
    assert all(torch.equal(before[name], tensor) for name, tensor in target.model.state_dict().items())


def test_a_stopped_run_ends_like_one_that_was_not(target: TrainingTarget, store: Store, tmp_path: Path) -> None:
    """Ctrl-C in the eighth step, and then a kill in the eleventh: the one costs that step, the other all since it."""
    whole = trainer(target, store, 12, tmp_path / "whole")
    whole.run()

    def stop(trainer: Trainer, step: int, how: type[BaseException]) -> None:
        loss = trainer._learner.loss

        def stopped(*arguments: Any) -> torch.Tensor | None:
            if trainer.state.step == step:
                raise how
            return loss(*arguments)

        trainer._learner.loss = stopped  # type: ignore[method-assign, assignment]
        with pytest.raises(how):
            trainer.run()

    stop(trainer(target, store, 12, tmp_path / "stopped"), 7, KeyboardInterrupt)
    again = trainer(target, store, 12, tmp_path / "stopped")
    assert again.state.step == 7
    stop(again, 10, MemoryError)  # nothing is saved
    again = trainer(target, store, 12, tmp_path / "stopped")
    assert again.state.step == 8, "the last evaluation"
    again.run()
    expected, found = (t._learner.module.state_dict() for t in (whole, again))
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert [p.accepted for p in whole.state.history] == [p.accepted for p in again.state.history]


def test_the_best_parameters_are_kept(target: TrainingTarget, store: Store, tmp_path: Path) -> None:
    """Of four evaluations the third is the best: the run ends with the parameters of then, not with its last ones."""
    run, found = trainer(target, store, 6, tmp_path), list[dict[str, torch.Tensor]]()

    def measure(batch: Any, agreements: Sequence[Agreement]) -> None:
        for agreement in agreements:
            agreement.add(torch.tensor([(0.1, 0.2, 0.4, 0.3)[len(run.state.history)]]), torch.zeros(1))

    def advance(amount: int) -> None:
        found.append(copy.deepcopy(run._learner.module.state_dict()))

    run._learner.measure = measure  # type: ignore[method-assign,unused-ignore]
    progress = Silent()
    progress.advance = advance  # type: ignore[method-assign]
    assert len(run.run(progress).history) == 4 and len(found) == 6
    state = run._learner.module.state_dict()
    same = [all(torch.equal(state[name], kept[name]) for name in state) for kept in found]
    assert same == [step == 4 for step in range(1, 7)]


def test_a_damaged_checkpoint_is_an_error(target: TrainingTarget, store: Store, tmp_path: Path) -> None:
    (tmp_path / CHECKPOINT).write_bytes(b"no tensors")
    with pytest.raises(ResourceError, match=r"checkpoint.pt: cannot be read .*; remove it to train again"):
        trainer(target, store, 3, tmp_path)


def test_the_vocabulary_holds_the_frequent_ids(target: TrainingTarget, store: Store) -> None:
    text = np.concatenate(
        [
            np.concatenate((rows.ids[rows.first_scored :], rows.top[rows.first_scored - 1 :]))
            for rows in map(store.rows, store.chosen(False))
        ]
    )
    few = choose_ids(store, target.vocab_size, 64, 1, 1_000_000)
    assert len(few.ids) == 64 and (np.diff(few.ids) > 0).all()
    assert few.coverage == pytest.approx(np.isin(text, few.ids).mean())
    assert (few.ids == few.offsets + np.arange(64)).all()
    counts = np.bincount(text, minlength=target.vocab_size)
    assert counts[few.ids].min() >= np.delete(counts, few.ids).max()
    dear = choose_ids(store, target.vocab_size, 8192, 1000, 1000)  # a row costs as much as the target
    assert len(dear.ids) == 64


def test_packed_rows_hold_every_conversation_once(store: Store) -> None:
    packing = Packing.of(store, 256)
    entries = list(store.chosen(False))
    rows = packing.rows(entries)
    assert sorted(e.number for row in rows for e in row) == sorted(e.number for e in entries)
    assert max(sum(e.num_tokens for e in row) for row in rows) <= packing.length
    used = sum(e.num_tokens for e in entries) / (len(rows) * packing.length)
    assert used > 0.85


def test_chain_rows_stay_in_their_conversation(store: Store) -> None:
    batches = Batches(store, Packing.of(store, 256), 0, torch.device("cpu"))
    batch = batches.batch(0, 0)
    assert batch is not None
    document, scored = batch.document.flatten(), batch.is_scored.flatten()
    for offset in (1, 2, 3):
        rows = batch.chain_rows(offset)
        assert len(rows) and bool((document[rows] == document[rows + offset]).all())
        assert bool(scored[rows + offset].all()) and bool((document[rows] >= 0).all())


def test_prompts_of_the_target_train_and_answers_alone_are_held_out(store: Store) -> None:
    packing = Packing.of(store, 256)
    batches = Batches(store, packing, 0, torch.device("cpu"))
    trained = [batches.batch(0, index) for index in range(batches.num_per_epoch)]
    held_out = list(batches.held_out(10**6))
    for parts, is_held_out in ((trained, False), (held_out, True)):
        entries = list(store.chosen(is_held_out))
        first = [entry.first_scored if is_held_out else entry.first_written for entry in entries]
        expected = sum(entry.num_tokens - start + 1 for entry, start in zip(entries, first, strict=True))
        assert sum(int(part.is_scored.sum()) for part in parts if part is not None) == expected
    assert any(entry.first_written < entry.first_scored for entry in store.chosen(False))


def test_the_rate_warms_up_and_falls() -> None:
    full = TrainRecipe()
    assert rate_at(0.0, full) < rate_at(0.015, full) < rate_at(0.03, full) == pytest.approx(1e-3)
    assert rate_at(0.5, full) < 1e-3 and rate_at(1.0, full) == pytest.approx(1e-5)


def test_other_options_do_not_continue_a_run(tmp_path: Path) -> None:
    claim(tmp_path, {"seed": 0, "kind": "head"})
    claim(tmp_path, {"seed": 0, "kind": "head"})
    with pytest.raises(UsageError, match=r"an interrupted run has seed 0, got 1; give the same options"):
        claim(tmp_path, {"seed": 1, "kind": "head"})
