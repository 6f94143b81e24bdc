"""From a store of text to a trained draft, in a work folder that a stopped run leaves for the next one."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specrt.engines.errors import UnsupportedModelError, UsageError
from specrt.engines.progress import SILENT, Progress
from specrt.engines.storage.files import write_text_file
from specrt.exporter.cutting import keep_layers
from specrt.exporter.heads.config import HeadVariant, default_taps
from specrt.exporter.training.batches import Batches, Packing
from specrt.exporter.training.learners import HeadLearner, LayersLearner, Learner, check_head_fits, new_head
from specrt.exporter.training.recipe import TrainRecipe
from specrt.exporter.training.store import Store
from specrt.exporter.training.target import TrainingTarget
from specrt.exporter.training.trainer import State, Trainer, check_text, seconds_of_a_step
from specrt.exporter.training.vocabulary import DraftVocabulary, choose_ids

SETTINGS = "settings.json"
_HELD_OUT = 12_000  # tokens of an evaluation
_HELD_OUT_OF_ALL_IDS = 4_000  # where all ids are drafted: there an evaluation takes as long as two steps


@dataclass(frozen=True)
class Trained:
    """A trained draft: its module has the best parameters. ``vocabulary`` is None for one that drafts all ids."""

    learner: Learner
    state: State
    vocabulary: DraftVocabulary | None


def taps_for(name: str, num_layers: int) -> tuple[int, ...]:
    """The taps of a head for a target of this many layers. Raises ``UnsupportedModelError`` for one with too few."""
    taps = default_taps(num_layers)
    if min(taps) < 1:
        raise UnsupportedModelError(
            f"{name}: has {num_layers} layers, expected 5 or more for a head, which reads three of them"
        )
    return taps


def check_trainable(target: TrainingTarget, kind: str, num_layers: int) -> None:
    """Raise before any text is written, if no draft of this kind can be trained.

    ``UnsupportedModelError`` for a target without the sizes of a head, ``UsageError`` for too many layers.
    """
    if kind == "head":
        check_head_fits(target)
    elif not 1 <= num_layers < target.num_layers:
        raise UsageError(f"--num-layers {num_layers}: expected 1 to {target.num_layers - 1} of the target's layers")


def claim(folder: Path, settings: Mapping[str, Any]) -> None:
    """Note the settings in the work folder. Raises ``UsageError`` if an earlier run has noted others."""
    path, text = folder / SETTINGS, json.dumps(settings, indent=1, sort_keys=True) + "\n"
    if not path.exists():
        write_text_file(path, text)
        return
    stored = json.loads(path.read_text(encoding="utf-8"))
    wanted = json.loads(text)
    for name in sorted(stored.keys() | wanted.keys()):
        if stored.get(name) != wanted.get(name):
            raise UsageError(
                f"{folder}: an interrupted run has {name} {json.dumps(stored.get(name))}, got "
                f"{json.dumps(wanted.get(name))}; give the same options to continue it, or remove the folder"
            )


def train_head(
    target: TrainingTarget, store: Store, recipe: TrainRecipe, folder: Path, progress: Progress = SILENT
) -> Trained:
    """A head for ``target`` on the text of ``store``; ``folder`` holds its checkpoints."""
    check_text(list(store.chosen(True)), list(store.chosen(False)))
    row_bytes = target.hidden_size * 4
    read_bytes = sum(p.numel() * 4 for p in target.model.parameters())
    vocabulary = choose_ids(store, target.vocab_size, recipe.max_draft_vocab, row_bytes, read_bytes)
    progress.note(
        f"draft vocabulary: {len(vocabulary.ids)} of {target.vocab_size} ids, {vocabulary.coverage:.1%} of the text"
    )
    variant = HeadVariant(target.taps, fc_norm="each")
    head = new_head(target, vocabulary, variant, recipe.seed)
    learner = HeadLearner(head, target, torch.from_numpy(vocabulary.ids), recipe.depth, recipe.decay)
    return Trained(learner, _train(learner, target, store, recipe, folder, progress), vocabulary)


def train_layers(
    target: TrainingTarget,
    store: Store,
    recipe: TrainRecipe,
    folder: Path,
    num_layers: int,
    progress: Progress = SILENT,
) -> Trained:
    """The first and last of the target's layers, ``num_layers`` together, trained as a model of its own."""
    check_text(list(store.chosen(True)), list(store.chosen(False)))
    model = copy.deepcopy(target.model)
    first = -(-num_layers // 2)
    keep_layers(model, [*range(first), *range(target.num_layers - (num_layers - first), target.num_layers)])
    learner = LayersLearner(model, target)
    state = _train(learner, target, store, recipe, folder, progress, _HELD_OUT_OF_ALL_IDS)
    return Trained(learner, state, None)


def _train(
    learner: Learner,
    target: TrainingTarget,
    store: Store,
    recipe: TrainRecipe,
    folder: Path,
    progress: Progress,
    held_out_tokens: int = _HELD_OUT,
) -> State:
    batches = Batches(store, Packing.of(store, recipe.tokens_per_step), recipe.seed, target.device)
    trainer = Trainer(learner, batches, recipe, folder, held_out_tokens)
    if trainer.fraction < 1:
        progress.note(_estimate(learner, batches, recipe))
    return trainer.run(progress)


def _estimate(learner: Learner, batches: Batches, recipe: TrainRecipe) -> str:
    """What the training will do, from the times of a few batches."""
    parameters = sum(p.numel() for p in learner.module.parameters() if p.requires_grad)
    step_s = median([*seconds_of_a_step(learner, batches)] or [0.0])
    num = recipe.num_steps or int((recipe.minutes or 0) * 60 / max(step_s, 1e-3))
    return (
        f"training: {parameters / 1e6:.2f} M parameters, {step_s:.2f} s a step; about {num} steps in "
        f"{num * step_s / 60:.1f} min, {num / max(1, batches.num_per_epoch):.1f} passes over the text"
    )
