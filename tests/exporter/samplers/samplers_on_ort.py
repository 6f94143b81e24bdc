"""Samplers in ONNX Runtime, and what they are fed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnxruntime as ort
from hypothesis import strategies as st

from specrt.engines.contract import INPUT_IDS, NUM_ACCEPTED, ROW_INDICES, ROWS, TOKENS, WIDTH, Contract, Dim
from specrt.engines.fake import fake_spec
from specrt.engines.interface import Array
from specrt.engines.ort.cpu import session_options
from specrt.engines.samplers import ACCEPT, CHUNK, DRAFT_PROBS, NUM_UNIFORMS, PROBS, UNIFORMS, WITHIN, sampler_contract
from specrt.exporter.samplers import sampler_graph

MAX_K = 8
BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))
TOLERANCE = 2e-6
VOCAB_SIZES = [2, 7, 320, 1500, 2053]  # 2053 is prime: its chunks are padded
# The model's vocabulary and the target's: a draft may have fewer or more ids, on either side of what filters sort.
PAIRS = [*((size, size) for size in VOCAB_SIZES), (7, 5), (5, 7), (320, 100), (100, 320), (1500, 900), (900, 1500)]
seeds = st.integers(0, 2**32)
row_counts = st.integers(1, MAX_K + 1)
temperatures = st.sampled_from([0.1, 0.7, 1.0, 2.0])
scales = st.sampled_from([0.02, 1.0, 4.0])  # nearly uniform, so that a nucleus is large; usual; sharp
Outputs = dict[str, Array]


@dataclass(frozen=True)
class Sampler:
    """A session; ``run`` takes inputs by the contract's names and checks the shapes of what comes out."""

    session: Any
    contract: Contract

    def run(self, inputs: dict[str, Array]) -> Outputs:
        assert {tensor.name for tensor in self.contract.inputs} == set(inputs)
        dims: dict[Dim, int] = {}
        for tensor in self.contract.inputs:
            assert inputs[tensor.name].dtype == tensor.dtype
            dims.update(zip(tensor.shape, inputs[tensor.name].shape, strict=True))
        names = [tensor.name for tensor in self.contract.outputs]
        outputs = dict(zip(names, self.session.run(names, inputs), strict=True))
        for tensor in self.contract.outputs:
            assert outputs[tensor.name].dtype == tensor.dtype
            assert outputs[tensor.name].shape == tensor.resolve({d: dims[d] for d in (WIDTH, ROWS) if d in dims})
        return outputs


@cache
def sampler(
    name: str, vocab_size: int, target_vocab_size: int | None = None, k: int = MAX_K, threads: int = 2
) -> Sampler:
    """The sampler on a model of ``vocab_size`` ids."""
    spec, target = fake_spec(vocab_size, k=k), target_vocab_size or vocab_size
    model = sampler_graph(name, spec, target).SerializeToString()
    session = ort.InferenceSession(model, session_options(threads, True), providers=["CPUExecutionProvider"])
    return Sampler(session, sampler_contract(name, spec, target))


def fed(drafted: Array, rng: np.random.Generator, vocab_size: int) -> dict[str, Array]:
    """A pass over some tokens and then ``drafted``; the rows are its last, with a gap now and then."""
    rows = len(drafted) + 1
    width = rows + int(rng.integers(0, 6))
    indices = np.arange(width - rows, width)
    if rng.random() < 0.3:
        indices = np.sort(rng.permutation(width)[:rows])
    ids = rng.integers(0, vocab_size, (1, width))
    ids[0, indices[1:]] = drafted
    return {INPUT_IDS: ids, ROW_INDICES: indices}


def scalar(value: float, dtype: str = "float32") -> Array:
    return np.array([value], dtype)


def random_logits(rng: np.random.Generator, rows: int, vocab_size: int, scale: float) -> Array:
    """Some with ties, some with banned ids."""
    logits = rng.normal(0, scale, (rows, vocab_size)).astype(np.float32)
    for row in logits:
        if rng.random() < 0.3:
            row[:] = np.round(row * 4 / scale) * scale / 4
        if rng.random() < 0.3:
            row[rng.integers(0, vocab_size, vocab_size // 2)] = -np.inf
            row[rng.integers(vocab_size)] = 1.0
    return logits


def in_target(logits: Array, target_vocab: int) -> Array:
    """Logits of the target's ids: without those that only the draft has, impossible for those it lacks."""
    missing = max(0, target_vocab - logits.shape[1])
    return np.pad(logits[:, :target_vocab], ((0, 0), (0, missing)), constant_values=-np.inf)


def dyadic(rng: np.random.Generator, vocab_size: int, units: int = 64) -> Array:
    """A distribution on at most ``units`` ids, in multiples of 1 / units. [V] f32"""
    counts = np.bincount(rng.integers(0, vocab_size, units), minlength=vocab_size)
    return (counts / units).astype(np.float32)


def halving(rng: np.random.Generator, vocab_size: int) -> Array:
    """A distribution of powers of two (1/2, 1/4, .. and the last again), so that p / q is exact. [V] f32"""
    count = int(rng.integers(1, min(7, vocab_size) + 1))
    weights = 0.5 ** np.minimum(np.arange(1, count + 1), count - 1)
    row = np.zeros(vocab_size, np.float32)
    row[rng.permutation(vocab_size)[:count]] = weights
    return row


@dataclass(frozen=True)
class Drafted:
    """A drafted block for the sampler ``block``, and the arguments of the reference."""

    p: Array  # [K + 1, V]
    q: Array  # [K, V]
    drafted: Array
    eta: Array
    final: tuple[float, float]

    @property
    def for_reference(self) -> Any:
        return self.p, self.q, self.drafted, self.eta, self.final

    def inputs(self, rng: np.random.Generator) -> dict[str, Array]:
        """What no sampler may use is stale: the draft's last row, the last eta, the final uniforms of later rows."""
        poison = np.float32(rng.choice([np.nan, 0.0, 1e6]))
        stale = np.full_like(self.p[:1], poison) if rng.random() < 0.5 else dyadic(rng, self.p.shape[1])[None]
        uniforms = np.full((len(self.p), NUM_UNIFORMS), poison, np.float32)
        uniforms[:-1, ACCEPT] = self.eta
        uniforms[0, [CHUNK, WITHIN]] = self.final
        draft_probs = np.vstack([self.q, stale])
        given = fed(self.drafted, rng, self.p.shape[1])
        return {PROBS: self.p, DRAFT_PROBS: draft_probs, UNIFORMS: uniforms, **given}


def verified(outputs: Outputs) -> tuple[int, int]:
    """Accepted n and the next token, which every row holds."""
    (accepted,), (token,) = outputs[NUM_ACCEPTED], np.unique(outputs[TOKENS])
    return int(accepted), int(token)
