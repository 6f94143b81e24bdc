"""An export of a tiny random model against transformers: logits of passes of all widths, and greedy ids."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from specrt.engines.contract import LOGITS, ModelSpec, model_contract
from specrt.engines.interface import Array, write_pass
from specrt.engines.ort.cpu import OrtEngine
from specrt.exporter.passes import optimize
from specrt.exporter.tracing.observe import observe
from specrt.exporter.tracing.trace import trace
from tests.exporter.tracing.architectures import ROWS, tiny_config
from tests.exporter.tracing.model_types import MODEL_TYPES, random_model, tiny_config_of

NUM_IDS = 40  # greedy ones
_PROMPT, _LENGTH = 20, 64
_WIDTHS = (5, 1, 9, 3)
TOLERANCE = 1e-4  # of the largest logit; measured 6e-5 at most (helium, moshi), as these weights are large


@dataclass(frozen=True)
class Comparison:
    """The largest error of the logits, as a share of the largest logit, and the greedy ids of both."""

    error: float
    ids: list[int]
    expected_ids: list[int]

    @property
    def is_equal(self) -> bool:
        return self.error <= TOLERANCE and self.ids == self.expected_ids


def compare(config: Any) -> Comparison:
    """Export a random model of ``config`` and compare it with transformers."""
    model = random_model(config)
    observation = observe(config)
    ids = np.random.default_rng(1).integers(3, observation.vocab_size, _LENGTH)
    with torch.no_grad():
        tokens = torch.from_numpy(ids)[None]
        logits: Array = model(input_ids=tokens, use_cache=False).logits[0].float().numpy()
        text = model.generate(
            tokens[:, :_PROMPT],
            max_new_tokens=NUM_IDS,
            do_sample=False,
            use_cache=False,  # the model as it is defined; the cached path of moshi gives another text
            eos_token_id=None,
            pad_token_id=0,
        )
    spec = ModelSpec(
        observation.vocab_size, _LENGTH, _LENGTH + 8, _LENGTH, max(_WIDTHS), "float32", observation.kv_layers
    )
    graph = optimize(trace(model, spec), spec)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        ir.save(graph, path, external_data="model.onnx.data")
        engine = OrtEngine(path, model_contract(spec), threads=1)
        error = np.abs(_logits(engine, ids) - logits).max() / np.abs(logits).max()
        return Comparison(float(error), _greedy(engine, ids[:_PROMPT]), text[0, _PROMPT:].tolist())


def _feed(binding: Any, ids: Array, start: int, rows: int) -> Array:
    write_pass(binding.host, ids, start, rows)
    binding.run(len(ids), rows)
    kept: Array = binding.host[LOGITS][:rows].copy()
    return kept


def _logits(engine: OrtEngine, ids: Array) -> Array:
    """Logits [N, V] of ``ids`` [N], in passes of several widths on a growing cache."""
    binding = engine.open()
    rows: list[Array] = []
    start = 0
    while start < len(ids):
        part = ids[start : start + _WIDTHS[len(rows) % len(_WIDTHS)]]
        rows.append(_feed(binding, part, start, len(part)))
        start += len(part)
    binding.close()
    return np.concatenate(rows)


def _greedy(engine: OrtEngine, prompt: Array) -> list[int]:
    binding = engine.open()
    found = [int(_feed(binding, prompt, 0, 1)[0].argmax())]
    while len(found) < NUM_IDS:
        start = len(prompt) + len(found) - 1
        found.append(int(_feed(binding, np.array(found[-1:]), start, 1)[0].argmax()))
    binding.close()
    return found


def config_of(name: str) -> Any:
    """The config of a row, or of a model type."""
    return tiny_config(name) if name in ROWS else tiny_config_of(name)


def print_checks(names: list[str]) -> int:
    """Compare ``names``, or all rows and model types, and print a line for each; return how many differ."""
    logging.disable(logging.WARNING)
    num_wrong = 0
    for name in names or dict.fromkeys([*ROWS, *MODEL_TYPES]):
        try:
            found = compare(config_of(name))
            distinct = len(set(found.ids))
            line = f"{'equal' if found.is_equal else 'DIFFERS'} {found.error:.1e}, {distinct} different ids"
            num_wrong += not found.is_equal
        except Exception as error:  # a script that goes on with the next one
            line = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        print(f"{name}: {line}", flush=True)
    return min(num_wrong, 1)
