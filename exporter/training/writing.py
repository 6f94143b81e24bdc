"""Text written by a torch model, many conversations at a time, with the hidden states of the same passes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from specrt.engines.interface import Array
from specrt.engines.progress import SILENT, Progress
from specrt.exporter.training import lanes
from specrt.exporter.training.lanes import RingCache, causal_mask, mask_of_lengths
from specrt.exporter.training.prompts import Outline, Outlines
from specrt.exporter.training.recipe import TextRecipe
from specrt.exporter.training.store import Rows, Store
from specrt.exporter.training.target import TappedRows, TrainingTarget

_MEASURED_PASSES = 5


@dataclass
class _Lane:
    """A conversation that is being written. ``ids`` has one id more than there are ``rows``."""

    outline: Outline
    ids: list[int]
    draws: np.random.Generator
    forced: list[int] = field(default_factory=list)
    first_scored: int | None = None  # None while the model writes its prompt
    is_finished: bool = False

    @property
    def is_of_use(self) -> bool:
        """Whether it has a part of an answer, for which it is stored when the writing ends or is interrupted."""
        return self.first_scored is not None and len(self.ids) > self.first_scored + 1

    def temperature(self) -> float:
        return 1.0 if self.first_scored is None else self.outline.temperature

    def add(self, token: int, ends: Sequence[int], recipe: TextRecipe) -> None:
        """Append the next id: the forced one if there is one, else the sampled ``token``."""
        if self.forced:
            self.ids.append(self.forced.pop(0))
            return
        outline = self.outline
        if self.first_scored is None:
            written = len(self.ids) - len(outline.opening)
            if token in (*ends, outline.closing[0]) or written >= recipe.max_prompt_tokens:
                self.first_scored = len(self.ids) + len(outline.closing)
                self.forced = list(outline.closing)
                token = self.forced.pop(0)
        elif token in ends or len(self.ids) + 1 - self.first_scored >= recipe.max_answer_tokens:
            self.is_finished = True
        self.ids.append(token)


class TextWriter:
    """Writes conversations into a store until the recipe's time or tokens are reached.

    The model's context holds the longest opening and answer (``TextRecipe.with_short_answers``).
    """

    def __init__(self, target: TrainingTarget, outlines: Outlines, recipe: TextRecipe) -> None:
        lanes.register()
        self._target, self._outlines, self._recipe = target, outlines, recipe
        self._window = outlines.longest_opening + recipe.max_answer_tokens
        self._cache = RingCache(target.num_layers, recipe.num_lanes, self._window)
        shape = (recipe.num_lanes, self._window)
        self._taps = np.zeros((*shape, len(target.taps) * target.hidden_size), np.float32)
        self._last = np.zeros((*shape, target.hidden_size), np.float32)
        self._normalizer, self._top = np.zeros(shape, np.float32), np.zeros(shape, np.int32)
        self._prompt: tuple[tuple[int, ...], list[tuple[torch.Tensor, torch.Tensor]], tuple[Array, ...]] | None = None

    def tokens_per_s(self) -> float:
        """The speed of a few passes, all lanes together."""
        with self._writing() as rows:
            working = [self._begin(self._outlines(number), number, rows) for number in range(self._recipe.num_lanes)]
            self._pass(working, rows)
            began = time.monotonic()
            for _ in range(_MEASURED_PASSES):
                self._pass(working, rows)
            return _MEASURED_PASSES * len(working) / (time.monotonic() - began)

    @contextmanager
    def _writing(self) -> Iterator[TappedRows]:
        model = self._target.model
        before = model.config._attn_implementation
        model.set_attn_implementation(lanes.IMPLEMENTATION)
        try:
            with torch.no_grad(), self._target.tapped() as rows:
                yield rows
        finally:
            model.set_attn_implementation(before)

    def write(self, store: Store, progress: Progress = SILENT) -> None:
        """Write until the recipe's end. What an earlier process wrote into ``store`` counts.

        Answers that the end or a signal cuts off are stored as well.
        """
        progress.step("writing text", total=self._recipe.budget)
        working: list[_Lane] = []
        started = time.monotonic() - store.seconds
        with self._writing() as rows, store.interruptible(lambda: self._keep(store, working, started)):
            clipped = self._write(store, rows, working, started, progress)
            clipped += self._keep(store, working, started)
        if clipped:
            progress.note(f"{clipped} values of hidden states were beyond the range of fp16 and were clipped")

    def _write(self, store: Store, rows: TappedRows, working: list[_Lane], started: float, progress: Progress) -> int:
        """Write with the lanes ``working`` until the recipe's end; return how many values were clipped."""
        done = {entry.number for entry in store.entries}
        shown, clipped, number = 0, 0, 0
        while not self._recipe.is_met_by(store.num_tokens, store.seconds):
            while len(working) < self._recipe.num_lanes:
                if number not in done:
                    working.append(self._begin(self._outlines(number), len(working), rows))
                number += 1
            self._pass(working, rows)
            seconds = time.monotonic() - started
            for index, lane in enumerate(working):
                if lane.is_finished:
                    clipped += self._store(store, lane, index, seconds)
                    while number in done:
                        number += 1
                    working[index] = self._begin(self._outlines(number), index, rows)
                    number += 1
            num_tokens = store.num_tokens + sum(len(lane.ids) - 1 for lane in working if lane.is_of_use)
            reached = self._recipe.reached(num_tokens, seconds)
            progress.advance(max(0, reached - shown))
            shown = max(shown, reached)
            if reached == self._recipe.budget:
                break
        return clipped

    def _keep(self, store: Store, working: Sequence[_Lane], started: float) -> int:
        """Store the parts of answers that are not in ``store``; return how many values were clipped."""
        done = {entry.number for entry in store.entries}
        clipped = 0
        for index, lane in enumerate(working):
            if lane.is_of_use and lane.outline.number not in done:
                clipped += self._store(store, lane, index, time.monotonic() - started)
        return clipped

    def _begin(self, outline: Outline, index: int, rows: TappedRows) -> _Lane:
        """Feed the opening, and put it into lane ``index``."""
        draws = np.random.Generator(np.random.Philox(key=[self._recipe.seed, outline.number]))
        first = None if outline.closing else len(outline.opening)
        lane = _Lane(outline, list(outline.opening), draws, first_scored=first)
        if self._prompt is None or self._prompt[0] != outline.opening:
            self._prompt = (outline.opening, *self._prefill(outline.opening, rows))
        _, kv, found = self._prompt
        self._cache.place(index, kv)
        for buffer, values in zip(self._buffers, found, strict=True):
            buffer[index, : len(outline.opening)] = values
        logits = torch.from_numpy(self._prompt_logits)
        lane.add(self._draw(logits, [lane])[0], self._target.eos_ids, self._recipe)
        return lane

    @property
    def _buffers(self) -> tuple[Array, Array, Array, Array]:
        return self._taps, self._last, self._normalizer, self._top

    def _prefill(
        self, opening: Sequence[int], rows: TappedRows
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], tuple[Array, ...]]:
        device = self._target.device
        self._cache.captured = []
        logits = self._target.model(
            input_ids=torch.tensor([opening], device=device),
            position_ids=torch.arange(len(opening), device=device)[None],
            attention_mask=causal_mask(len(opening), device),
            cache=self._cache,
            use_cache=True,
        ).logits[0]
        kv, self._cache.captured = self._cache.captured, None
        self._prompt_logits = logits[-1:].float().cpu().numpy()
        found = rows.taps[0], rows.last[0], logits.logsumexp(-1), logits.argmax(-1)
        return kv, tuple(values.cpu().numpy() for values in found)

    def _pass(self, working: list[_Lane], rows: TappedRows) -> None:
        """Feed the newest id of each lane, keep the rows, and append the next id."""
        device, cache = self._target.device, self._cache
        lengths = torch.tensor([len(lane.ids) for lane in working], device=device)
        logits = self._target.model(
            input_ids=torch.tensor([[lane.ids[-1]] for lane in working], device=device),
            position_ids=(lengths - 1)[:, None],
            attention_mask=mask_of_lengths(lengths, cache.column, self._window),
            cache=cache,
            use_cache=True,
        ).logits[:, -1]
        cache.column = (cache.column + 1) % self._window
        found = rows.taps[:, -1], rows.last[:, -1], logits.logsumexp(-1), logits.argmax(-1)
        places = (np.arange(len(working)), (lengths - 1).cpu().numpy())
        for buffer, values in zip(self._buffers, found, strict=True):
            buffer[places] = values.cpu().numpy()
        for lane, token in zip(working, self._draw(logits, working), strict=True):
            lane.add(token, self._target.eos_ids, self._recipe)

    def _draw(self, logits: torch.Tensor, working: Sequence[_Lane]) -> list[int]:
        """The next id of each lane by inverse CDF; [B, V] -> B ids. Each conversation has its own draws."""
        temperatures = torch.tensor([lane.temperature() for lane in working], device=logits.device)
        chosen = logits.argmax(-1)
        warm = temperatures > 0
        if bool(warm.any()):
            uniforms = torch.tensor(
                [lane.draws.random() for lane in working], dtype=torch.float64, device=logits.device
            )
            sums = (logits[warm] / temperatures[warm, None]).softmax(-1).cumsum(-1, dtype=torch.float64)
            drawn = torch.searchsorted(sums, uniforms[warm, None] * sums[:, -1:], right=True)[:, 0]
            chosen[warm] = drawn.clamp(max=logits.shape[-1] - 1)
        found: list[int] = chosen.tolist()
        return found

    def _store(self, store: Store, lane: _Lane, index: int, seconds: float) -> int:
        assert lane.first_scored is not None, "a conversation is stored after its prompt"
        length = len(lane.ids) - 1  # the last id was not fed
        taps, last, normalizer, top = (buffer[index, :length] for buffer in self._buffers)
        ids = np.array(lane.ids[:length], np.int32)
        rows = Rows(ids, taps, last, normalizer, top, len(lane.outline.opening), lane.first_scored)
        return store.add(lane.outline.number, rows, seconds, lane.outline.is_held_out)
