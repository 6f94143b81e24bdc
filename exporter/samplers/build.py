"""A row for each sampler: its name and the function that writes its nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx

from specrt.engines.contract import STANDARD_22_DIALECT, ModelSpec
from specrt.engines.samplers import (
    BLOCK,
    FILTER,
    FILTER_WIDE,
    LOGPROBS,
    MATCH,
    MATCH_SAMPLED,
    NUCLEUS,
    NUM_SORTED,
    NUM_SORTED_WIDE,
    PENALTIES,
    SAMPLER_NAMES,
    SOFTMAX,
    sampler_contract,
)
from specrt.exporter.samplers.verification import write_block, write_match, write_match_sampled
from specrt.exporter.samplers.warping import (
    write_filter,
    write_logprobs,
    write_nucleus,
    write_penalties,
    write_softmax,
)
from specrt.exporter.samplers.writer import GraphWriter, drafted_ids

_WRITERS: dict[str, Callable[[GraphWriter, ModelSpec, int], None]] = {
    MATCH: lambda g, spec, vocab: write_match(g, drafted_ids(g), spec.vocab_size),
    PENALTIES: lambda g, spec, vocab: write_penalties(g, drafted_ids(g)),
    SOFTMAX: lambda g, spec, vocab: write_softmax(g, spec.vocab_size, vocab),
    FILTER: lambda g, spec, vocab: write_filter(g, spec.vocab_size, vocab, NUM_SORTED),
    FILTER_WIDE: lambda g, spec, vocab: write_filter(g, spec.vocab_size, vocab, NUM_SORTED_WIDE),
    NUCLEUS: lambda g, spec, vocab: write_nucleus(g, spec.vocab_size, vocab),
    MATCH_SAMPLED: lambda g, spec, vocab: write_match_sampled(g, drafted_ids(g), vocab),
    BLOCK: lambda g, spec, vocab: write_block(g, drafted_ids(g), vocab, spec.max_rows),
    LOGPROBS: lambda g, spec, vocab: write_logprobs(g, spec.vocab_size),
}


def sampler_graph(name: str, spec: ModelSpec, vocab_size: int) -> onnx.ModelProto:
    """The graph of sampler ``name`` on the logits of the model of ``spec``; ``vocab_size`` is the target's.

    Raises ``ValueError`` for an unknown name.
    """
    g = GraphWriter(name, sampler_contract(name, spec, vocab_size), has_cumsum=spec.dialect != STANDARD_22_DIALECT)
    _WRITERS[name](g, spec, vocab_size)
    return g.model()


def write_samplers(folder: Path, place: str, spec: ModelSpec, vocab_size: int) -> dict[str, str]:
    """Write all samplers into ``folder / place``; return their paths in ``folder`` by name."""
    (folder / place).mkdir(parents=True)
    paths = {name: f"{place}/{name}.onnx" for name in SAMPLER_NAMES}
    for name, path in paths.items():
        onnx.save(sampler_graph(name, spec, vocab_size), folder / path)
    return paths
