"""The graphs of a bundle as things to compare: passes, limits of each output, and who else computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specrt.engines.contract import (
    FEATURE_CACHE,
    FEATURE_ROWS,
    INPUT_IDS,
    LOGITS,
    POSITION_IDS,
    ROW_INDICES,
    SEQLENS_K,
    TOTAL_SEQUENCE_LENGTH,
    WIDTH,
    Contract,
    model_contract,
)
from specrt.engines.interface import Array
from specrt.engines.manifest import Manifest, ModelEntry
from specrt.engines.samplers import SAMPLER_NAMES, sampler_contract
from specrt.tools.compare.cases import TOLERANCES, cases_of, expected_of

IN_NUMPY, STORED = "numpy", "the torch model's stored logits"
NO_CPU_KERNELS = "bfloat16"  # ONNX Runtime's CPU provider has no kernels of this dtype

Feed = Mapping[str, Array]


@dataclass(frozen=True)
class Graph:
    """A graph to compare. ``tolerances`` are absolute, of each output that is compared.

    ``feeds`` are the inputs of its passes, in order; ``reference`` computes the outputs without the graph.
    """

    path: str
    contract: Contract
    feeds: tuple[Feed, ...]
    tolerances: dict[str, float]
    reference: Callable[[Feed], Feed]
    reference_name: str


def graphs_of(bundle: Path, manifest: Manifest, has_reference: bool) -> Iterator[Graph]:
    """The samplers of both models, those that they share once, then the models that the CPU can run.

    With ``has_reference`` a model's passes end where the bundle stores logits, and are of each width otherwise.
    """
    entries = [entry for entry in (manifest.target, manifest.draft.model) if entry is not None]
    seen: set[str] = set()
    for entry in entries:
        for name in SAMPLER_NAMES:
            if entry.samplers[name] not in seen:
                seen.add(entry.samplers[name])
                yield _sampler(entry, name, manifest.target.spec.vocab_size)
    for entry in entries:
        if entry.spec.dtype != NO_CPU_KERNELS:
            yield _model(bundle, entry, has_reference)


def _sampler(entry: ModelEntry, name: str, vocab_size: int) -> Graph:
    contract = sampler_contract(name, entry.spec, vocab_size)
    cases = list(cases_of(name, contract))
    tolerances = {output: TOLERANCES.get(output, 0.0) for output in cases[0].expected}

    def reference(feed: Feed) -> Feed:
        return expected_of(name, contract, feed)

    return Graph(entry.samplers[name], contract, tuple(case.feed for case in cases), tolerances, reference, IN_NUMPY)


def _model(bundle: Path, entry: ModelEntry, has_reference: bool) -> Graph:
    """Passes over the reference text on a growing cache."""
    contract, stored = model_contract(entry.spec), np.load(bundle / entry.reference)
    ids, positions = stored["ids"], [int(position) for position in stored["positions"]]
    logits = dict(zip(positions, stored["logits"], strict=True))
    if has_reference:
        ends = [position + 1 for position in positions]
    else:
        widths = [1 + index % entry.spec.max_rows for index in range(len(ids))]
        ends = [int(end) for end in np.cumsum(widths) if end <= len(ids)]
    starts = [0, *ends[:-1]]
    read = _features(entry, stored)
    feeds = tuple(
        _pass(contract, ids, start, end, 1 if has_reference else end - start) | read
        for start, end in zip(starts, ends, strict=True)
    )

    def reference(feed: Feed) -> Feed:
        return {LOGITS: np.stack([logits[int(p)] for p in feed[POSITION_IDS][0][feed[ROW_INDICES]]])}

    limit = entry.logits_tolerance * entry.parity.max_abs_logit
    return Graph(entry.graph, contract, feeds, {LOGITS: limit}, reference, STORED)


def _features(entry: ModelEntry, stored: Feed) -> dict[str, Array]:
    """The features that the reference of a head was computed with, for each of its passes."""
    if not entry.spec.reads_features:
        return {}
    features = stored["features"]
    padding = ((0, entry.spec.feature_slots - len(features)), (0, 0))
    return {FEATURE_CACHE: np.pad(features, padding).astype(entry.spec.dtype)}


def _pass(contract: Contract, ids: Array, start: int, end: int, rows: int) -> dict[str, Array]:
    """The inputs of a pass over the tokens from ``start`` to ``end`` that returns its last ``rows`` rows."""
    width = end - start
    feed: dict[str, Array] = {INPUT_IDS: ids[None, start:end], POSITION_IDS: np.arange(start, end)[None]}
    feed[ROW_INDICES] = np.arange(width - rows, width)
    if any(tensor.name == FEATURE_ROWS for tensor in contract.inputs):
        feed[FEATURE_ROWS] = np.arange(start, end)
    if any(tensor.name == SEQLENS_K for tensor in contract.inputs):
        feed |= {SEQLENS_K: np.array([end - 1], np.int32), TOTAL_SEQUENCE_LENGTH: np.array([end], np.int32)}
    return feed


def passes_of(contract: Contract, feed: Feed) -> Iterator[Feed]:
    """``feed``, cut into passes that are no wider than ``contract`` allows; the last one has its rows."""
    most = contract.limits[WIDTH]
    if INPUT_IDS not in feed or POSITION_IDS not in feed:
        yield feed
        return
    ids, positions = feed[INPUT_IDS][0], feed[POSITION_IDS][0]
    start, rows = 0, len(feed[ROW_INDICES])
    read = {FEATURE_CACHE: feed[FEATURE_CACHE]} if FEATURE_CACHE in feed else {}
    while len(ids) - start > most:
        first = int(positions[start])
        yield _pass(contract, np.pad(ids, (int(positions[0]), 0)), first, first + most, 1) | read
        start += most
    last = _pass(contract, np.pad(ids, (int(positions[0]), 0)), int(positions[start]), int(positions[-1]) + 1, rows)
    yield last | read
