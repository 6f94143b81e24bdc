"""The training loop: batches, schedule, evaluations, checkpoints. A run that was stopped continues where it was."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from specrt.engines.codec import from_json
from specrt.engines.errors import ResourceError, UsageError, one_line
from specrt.engines.progress import SILENT, Progress
from specrt.engines.storage.files import cannot_write
from specrt.exporter.training.batches import Batch, Batches
from specrt.exporter.training.learners import Learner
from specrt.exporter.training.loss import Agreement, Objective
from specrt.exporter.training.recipe import TrainRecipe

CHECKPOINT, BEST = "checkpoint.pt", "best.pt"
_HINT = "make room, then run the same command again: it continues"
_CHECKPOINT_S = 60.0
_MEASURED_STEPS = 3


@dataclass(frozen=True)
class Point:
    """An evaluation on the held-out part: by step of the chain, the mean expected acceptance of a sampled draft
    (``accepted``), and the share of positions where target and draft have the same most likely id (``same``).
    """

    step: int
    seconds: float
    loss: float | None
    accepted: tuple[float, ...]
    same: tuple[float, ...]

    @property
    def tokens_per_round(self) -> float:
        """Expected tokens of a round of as many drafted tokens as there are steps."""
        return 1 + sum(math.prod(self.accepted[: n + 1]) for n in range(len(self.accepted)))


@dataclass
class State:
    """Where a run is. ``seconds`` of training, evaluations not counted."""

    step: int = 0
    epoch: int = 0
    index: int = 0
    seconds: float = 0.0
    history: list[Point] = field(default_factory=list)

    @property
    def best(self) -> Point | None:
        return max(self.history, key=lambda point: point.tokens_per_round, default=None)


def rate_at(fraction: float, recipe: TrainRecipe) -> float:
    """The learning rate after this share of the training."""
    if fraction < recipe.warmup_share:
        return recipe.max_rate * max(fraction / recipe.warmup_share, 0.02)
    done = min(1.0, (fraction - recipe.warmup_share) / (1 - recipe.warmup_share))
    return recipe.min_rate + (recipe.max_rate - recipe.min_rate) * (1 + math.cos(math.pi * done)) / 2


class Trainer:
    """Trains ``learner`` and keeps its best parameters. A checkpoint in ``folder`` is continued.

    An evaluation reads about ``held_out_tokens``.
    """

    def __init__(
        self, learner: Learner, batches: Batches, recipe: TrainRecipe, folder: Path, held_out_tokens: int
    ) -> None:
        self._learner, self._batches, self._recipe, self._folder = learner, batches, recipe, folder
        self._parameters = {n: p for n, p in learner.module.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(self._parameters.values(), recipe.max_rate, (0.9, 0.95), weight_decay=0.0)
        self._held_out = list(batches.held_out(held_out_tokens))
        self._losses: list[float] = []
        self._is_whole = True  # False while parameters and state are of different steps
        self.state = State()
        if (folder / CHECKPOINT).exists():
            self._load()

    @property
    def fraction(self) -> float:
        """Share of the training that is done."""
        recipe, state = self._recipe, self.state
        if recipe.num_steps is not None:
            return min(1.0, state.step / recipe.num_steps)
        return min(1.0, state.seconds / ((recipe.minutes or 0) * 60))

    def run(self, progress: Progress = SILENT) -> State:
        """Train to the end of the recipe; the module then has the best parameters. A signal costs the step at work."""
        progress.step("training", total=1000)
        try:
            self._run(progress)
        except Exception:
            raise
        except BaseException:  # Ctrl-C, or another signal
            if self._is_whole:
                self.save()
            raise
        self._restore_best()
        return self.state

    def _run(self, progress: Progress) -> None:
        state, recipe = self.state, self._recipe
        if not state.history:
            self._evaluate(progress)
        shown, saved = 0, time.monotonic()
        while self.fraction < 1:
            self._step()
            done = self.fraction
            if done >= len(state.history) / recipe.num_evaluations or done >= 1:
                self._evaluate(progress)
                saved = time.monotonic()
            if time.monotonic() - saved > _CHECKPOINT_S:
                self.save()
                saved = time.monotonic()
            progress.advance(int(done * 1000) - shown)
            shown = int(done * 1000)

    def _step(self) -> None:
        fraction, state, began = self.fraction, self.state, time.monotonic()
        objective: Objective = "kl" if fraction < self._recipe.kl_share else "acceptance"
        for group in self._optimizer.param_groups:
            group["lr"] = rate_at(fraction, self._recipe)
        agreements = [Agreement() for _ in range(self._learner.depth)]
        batch, epoch, index = self._next()
        loss = self._learner.loss(batch, objective, agreements)
        if loss is not None:
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._recipe.clip)
        self._is_whole = False
        if loss is not None:
            self._optimizer.step()
            self._losses.append(float(loss.detach()))
        state.step, state.epoch, state.index = state.step + 1, epoch, index + 1
        state.seconds += time.monotonic() - began
        self._is_whole = True

    def _next(self) -> tuple[Batch, int, int]:
        """The next batch, its epoch, and its place there."""
        epoch, index = self.state.epoch, self.state.index
        batch = self._batches.batch(epoch, index)
        if batch is None:
            epoch, index = epoch + 1, 0
            batch = self._batches.batch(epoch, index)
            assert batch is not None, "an epoch has a batch"
        return batch, epoch, index

    def _evaluate(self, progress: Progress) -> None:
        """Add a point, keep the parameters if they are the best, and save."""
        agreements = [Agreement() for _ in range(self._learner.depth)]
        for batch in self._held_out:
            self._learner.measure(batch, agreements)
        rates = [(a.accepted / max(1, a.num), a.same / max(1, a.num)) for a in agreements]
        loss = sum(self._losses) / len(self._losses) if self._losses else None
        self._losses.clear()
        accepted, same = zip(*rates, strict=True)
        point = Point(self.state.step, self.state.seconds, loss, accepted, same)
        best = self.state.best
        if best is None or point.tokens_per_round > best.tokens_per_round:
            _save({"step": point.step, "parameters": self._parameters}, self._folder / BEST)
        self.state.history.append(point)
        self.save()
        progress.note(line_of(point))

    def save(self) -> None:
        """Write the checkpoint. Raises ``ResourceError``."""
        content = {
            "state": {**asdict(self.state)},
            "parameters": self._parameters,
            "optimizer": self._optimizer.state_dict(),
            "losses": self._losses,
        }
        _save(content, self._folder / CHECKPOINT)

    def _load(self) -> None:
        content = load_tensors(self._folder / CHECKPOINT)
        self._set(content["parameters"])
        self._optimizer.load_state_dict(content["optimizer"])
        self._losses = list(content["losses"])
        state = content["state"]
        history = [
            from_json(Point, {**p, "accepted": list(p["accepted"]), "same": list(p["same"])}) for p in state["history"]
        ]
        self.state = State(state["step"], state["epoch"], state["index"], state["seconds"], history)

    def _restore_best(self) -> None:
        self._set(load_tensors(self._folder / BEST)["parameters"])

    def _set(self, stored: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(stored[name])


def line_of(point: Point) -> str:
    """A point in one line."""
    accepted, same = (" ".join(f"{rate:.3f}" for rate in rates) for rates in (point.accepted, point.same))
    loss = "" if point.loss is None else f", loss {point.loss:.3f}"
    return f"step {point.step}, {point.seconds / 60:.1f} min{loss}: held out, accepted {accepted}, same id {same}"


def load_tensors(path: Path) -> dict[str, Any]:
    """The content of a file that this module wrote. Raises ``ResourceError``."""
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can make its reader raise anything
        raise ResourceError(f"{path}: cannot be read ({one_line(error)}); remove it to train again") from error
    return content


def _save(content: dict[str, Any], path: Path) -> None:
    """Write next to ``path`` and rename, so that a file is complete. Raises ``ResourceError``."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        torch.save(content, partial)
        partial.replace(path)
    except (OSError, RuntimeError) as error:
        raise cannot_write(path, error, _HINT) from error


def seconds_of_a_step(learner: Learner, batches: Batches, objective: Objective = "acceptance") -> Iterator[float]:
    """Times of forward and backward passes of a few batches; no parameter changes."""
    for index in range(_MEASURED_STEPS):
        batch = batches.batch(0, index)
        if batch is None:
            return
        began = time.monotonic()
        loss = learner.loss(batch, objective, [Agreement() for _ in range(learner.depth)])
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]
        yield time.monotonic() - began
    learner.module.zero_grad()


def check_text(held_out: Sequence[Any], train: Sequence[Any]) -> None:
    """Raise ``UsageError`` for a text without a held-out part, or with nothing else."""
    if not held_out or not train:
        raise UsageError(
            f"text: got {len(train)} conversations to train on and {len(held_out)} held out, expected one of each at "
            "least; write more (--minutes, --tokens)"
        )
