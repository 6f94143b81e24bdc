"""Text written by the deployed target: its graph, quantized as it is, by the runtime, with n-gram drafts on.

The target is exported again with its hidden states as one more output. Tokens and hidden states come from the same
passes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import specrt
from specrt.engines.contract import ModelSpec
from specrt.engines.errors import ParityError
from specrt.engines.interface import Memory
from specrt.engines.manifest import LOGITS_TOLERANCE, manifest_from_bundle
from specrt.engines.processor import available_cores
from specrt.engines.progress import SILENT, Progress
from specrt.runtime.completion import Completion
from specrt.runtime.options import options_of
from specrt.runtime.result import Stats
from specrt.runtime.runtime import Runtime
from specrt.runtime.settings import settings_of

if TYPE_CHECKING:
    from specrt.exporter.training.prompts import Outline, Outlines
    from specrt.exporter.training.recipe import TextRecipe
    from specrt.exporter.training.store import Rows, Store
    from specrt.exporter.training.target import TrainingTarget
    from specrt.tools.distill.source import Source


class FeatureLog:
    """Keeps a target's features by position: a ``specrt.runtime.model.FeatureReader``."""

    def __init__(self, spec: ModelSpec) -> None:
        assert spec.feature_size is not None, "the target was exported with its hidden states"
        self.rows = np.zeros((spec.capacity + spec.max_width, spec.feature_size), spec.dtype)

    def take_features(self, start: int, features: Memory) -> None:
        """See ``FeatureReader``."""
        self.rows[start : start + len(features)] = np.asarray(features)

    def copy_features(self) -> None:
        """Nothing to do: they were copied when taken."""

    def keep_features(self, num_kept: int) -> int:
        """Rows beyond are stale, and are overwritten before they are read."""
        return num_kept


def export_with_features(target: TrainingTarget, source: Source, output: Path, progress: Progress = SILENT) -> None:
    """Export the target to ``output`` with its taps and its last layer's output as features.

    It is as in the bundle of ``source``, in fp32 without one. Raises ``ParityError`` if its logits on the reference
    ids are not those of that bundle.
    """
    from specrt.exporter.export import export

    export(source.options(output, feature_taps=(*target.taps, target.num_layers)), progress)
    if source.bundle is not None:
        progress.step("comparing with the given bundle")
        compare_logits(source.bundle, output)


def compare_logits(given: Path, output: Path) -> None:
    """Raise ``ParityError`` unless both bundles' targets have the same logits on the reference ids of ``given``."""
    from specrt.exporter.parity.reference import graph_logits

    wanted, made = (manifest_from_bundle(folder).target for folder in (given, output))
    ids = np.load(given / wanted.reference)["ids"]
    found = [
        graph_logits(folder / entry.graph, entry.spec, ids, available_cores(), prepack=entry.quantization != "none")
        for folder, entry in ((given, wanted), (output, made))
    ]
    difference, largest = float(np.abs(found[0] - found[1]).max()), float(np.abs(found[0]).max())
    if not difference <= LOGITS_TOLERANCE[wanted.spec.dtype] * largest:
        changed = "exporter" if (wanted.fingerprint, wanted.adapter) == (made.fingerprint, made.adapter) else "source"
        raise ParityError(
            f"{given}: its logits differ by {difference:.2g} (largest {largest:.2g}) from those of its source exported "
            f"again, since the {changed} changed; export the bundle again"
        )


@dataclass
class _Conversation:
    """A conversation that is being written: all ``tokens`` but the newest were fed, and have their hidden states."""

    outline: Outline
    tokens: list[int] = field(default_factory=list)
    first_scored: int | None = None  # None until its prompt is complete


class BundleWriter:
    """Writes conversations one at a time with a bundle of ``export_with_features``."""

    def __init__(
        self, bundle: Path, target: TrainingTarget, outlines: Outlines, recipe: TextRecipe, threads: int | None = None
    ) -> None:
        self._runtime: Runtime = specrt.load(bundle, threads=threads)
        self._target, self._outlines, self._recipe = target, outlines, recipe
        self._slot = self._runtime.open_slot("none")
        self._log = FeatureLog(self._runtime.manifest.target.spec)
        self._slot.target.model.feature_reader = self._log

    def tokens_per_s(self) -> float:
        """The speed of one conversation."""
        began = time.monotonic()
        conversation = _Conversation(self._outlines(0))
        self._converse(conversation)
        return len(conversation.tokens) / (time.monotonic() - began)

    def write(self, store: Store, progress: Progress = SILENT) -> None:
        """Write until the recipe's end. What an earlier process wrote into ``store`` counts.

        An answer that a signal cuts off is stored as well.
        """
        budget = self._recipe.budget
        progress.step("writing text", total=budget)
        done = {entry.number for entry in store.entries}
        started, shown, number, clipped = time.monotonic() - store.seconds, 0, 0, 0
        while (reached := self._recipe.reached(store.num_tokens, store.seconds)) < budget:
            progress.advance(reached - shown)
            shown = reached
            while number in done:
                number += 1
            conversation = _Conversation(self._outlines(number))
            with store.interruptible(partial(self._keep, store, conversation, started)):
                self._converse(conversation)
                clipped += self._keep(store, conversation, started)
            number += 1
        if clipped:
            progress.note(f"{clipped} values of hidden states were beyond the range of fp16 and were clipped")

    def _keep(self, store: Store, conversation: _Conversation, started: float) -> int:
        """Store an answer or a part of it that is not in ``store``; return how many values were clipped."""
        outline, first, tokens = conversation.outline, conversation.first_scored, conversation.tokens
        if first is None or len(tokens) <= first + 1 or any(entry.number == outline.number for entry in store.entries):
            return 0
        rows = self._rows(tokens[:-1], len(outline.opening), first)
        return store.add(outline.number, rows, time.monotonic() - started, outline.is_held_out)

    def _converse(self, conversation: _Conversation) -> None:
        """Write a prompt, if the outline says so, and its answer."""
        outline, recipe = conversation.outline, self._recipe
        tokens = list(outline.opening)
        if outline.closing:
            self._continue(conversation, tokens, recipe.max_prompt_tokens, 1.0, outline.closing[:1])
            tokens = conversation.tokens
            ends = {*self._target.eos_ids, outline.closing[0]}
            tokens = [*(tokens[:-1] if tokens[-1] in ends else tokens), *outline.closing]
        conversation.first_scored = len(tokens)
        self._continue(conversation, tokens, recipe.max_answer_tokens, outline.temperature, ())

    def _continue(
        self, conversation: _Conversation, tokens: Sequence[int], most: int, temperature: float, ends: Sequence[int]
    ) -> None:
        """Extend the conversation, which is ``tokens``, by at most ``most`` tokens."""
        runtime = self._runtime
        wanted = options_of(
            {
                "max_new_tokens": most,
                "temperature": temperature,
                "seed": self._recipe.seed + conversation.outline.number if temperature else None,
                "stop_token_ids": tuple(ends),
                "draft": "ngram",
            }
        )
        settings = settings_of(wanted, runtime.manifest, True)
        completion = Completion(tokens, settings, runtime.manifest.target.spec.max_seq_len)
        conversation.tokens = completion.tokens  # the list itself, which grows
        for _ in runtime.rounds(self._slot, completion, Stats()):
            pass

    def _rows(self, tokens: Sequence[int], *first: int) -> Rows:
        import torch

        from specrt.exporter.training.store import Rows

        features = self._log.rows[: len(tokens)].astype(np.float32)
        width = len(self._target.taps) * self._target.hidden_size
        with torch.no_grad():
            last = self._target.final_norm(torch.from_numpy(features[:, width:]).to(self._target.device))
            logits = last @ self._target.lm_head.T
        normalizer, top = logits.logsumexp(-1), logits.argmax(-1)
        last_rows, normalizers, tops = (found.cpu().numpy() for found in (last, normalizer, top))
        return Rows(np.array(tokens, np.int32), features[:, :width], last_rows, normalizers, tops, *first)

    def __enter__(self) -> BundleWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._slot.close()
        self._runtime.close()
