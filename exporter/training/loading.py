"""The target of a training, from its source."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specrt.engines.progress import SILENT, Progress
from specrt.exporter.options import ExportOptions
from specrt.exporter.sources.adapters import AdapterChoice, find_adapted
from specrt.exporter.sources.ending import eos_ids
from specrt.exporter.sources.merging import load_adapted
from specrt.exporter.training.run import taps_for
from specrt.exporter.training.target import TrainingTarget


def load_target(
    options: ExportOptions, taps: Sequence[int] | None = None, progress: Progress = SILENT
) -> TrainingTarget:
    """The model in fp32 that ``options`` export. ``taps`` are those of a head where none are given.

    Raises as the export does, and ``UnsupportedModelError`` for a model that no draft can be trained for.
    """
    progress.step("reading configs")
    choice = AdapterChoice(options.adapter, options.adapter_revision, options.no_adapter)
    source = find_adapted(options.target, options.revision, options.trust_remote_code, choice)
    name = options.target
    num_layers = int(source.config.get_text_config().num_hidden_layers)
    chosen = tuple(taps) if taps is not None else taps_for(name, num_layers)
    progress.step("loading weights")
    model, _ = load_adapted(source, torch.float32, progress)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device).requires_grad_(False)
    ends = eos_ids(
        source.config, source.generation_config(), source.tokenizer, model.config.get_text_config().vocab_size
    )
    return TrainingTarget(name, model, source.tokenizer, chosen, ends)
