"""A model and a sampler in numpy with the same contract, for tests of the loop and measurements of its cost.

The fake model's next token is a function of the tokens *in its cache*, which it keeps in the key buffer of layer 0. A
wrong position, a missed row or a bad rollback changes its output, as with a real model. The same holds for the features
of a fake target and for a fake head that reads them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from specrt.engines import numpy_samplers, samplers
from specrt.engines.contract import (
    FEATURE_CACHE,
    FEATURE_ROWS,
    FEATURES,
    HIDDEN,
    INPUT_IDS,
    LOGITS,
    NUM_ACCEPTED,
    POSITION_IDS,
    ROW_INDICES,
    ROWS,
    SEQLENS_K,
    TOKENS,
    TOTAL_SEQUENCE_LENGTH,
    Contract,
    KVLayer,
    ModelSpec,
    model_contract,
    past_name,
    plan_buffers,
)
from specrt.engines.interface import Array, HostBinding, allocate, check_shared

# The next token after a prefix, or its logits [V] f32
NextToken = Callable[[Sequence[int]], int | Array]
Pairs = Sequence[tuple[float, int]]  # (feature, id) each


def fake_spec(vocab_size: int = 64, max_seq_len: int = 128, k: int = 8, max_width: int = 16) -> ModelSpec:
    """A small spec: one layer, one KV sampler of size 1 (fp32 holds token ids below 2**24 exactly)."""
    return ModelSpec(
        vocab_size, max_seq_len, max_seq_len + k, max(max_width, k + 2), k + 1, "float32", (KVLayer(1, 1),)
    )


class _Binding(HostBinding):
    def __init__(self, owner: _Engine, shared: Mapping[str, Array]) -> None:
        self._owner, self.is_open = owner, True
        buffers: dict[str, Array] = {}
        for buffer in plan_buffers(owner.contract, frozenset(shared)):
            if buffer.owner == "shared":
                check_shared(buffer.name, shared[buffer.name], buffer.shape, buffer.dtype)
            own = buffer.owner == "self"
            buffers[buffer.name] = allocate(buffer.shape, buffer.dtype) if own else shared[buffer.name]
        self.host: Mapping[str, Array] = MappingProxyType(buffers)

    def run(self, width: int, rows: int) -> None:
        if not self.is_open:
            raise RuntimeError("this binding is closed")
        self._owner.compute(self.host, width, rows)

    def close(self) -> None:
        self.is_open = False
        self.host = MappingProxyType({})


class _Engine:
    def __init__(self, contract: Contract) -> None:
        self.contract = contract

    def open(self, shared: Mapping[str, Array] | None = None) -> _Binding:
        return _Binding(self, shared or {})

    def compute(self, host: Mapping[str, Array], width: int, rows: int) -> None:
        raise NotImplementedError


def feature_of(prefix: Sequence[float]) -> float:
    """The fake target's feature after ``prefix``: a number that fp32 holds exactly."""
    return float(
        int.from_bytes(hashlib.blake2b(array("d", prefix).tobytes(), digest_size=4).digest(), "big") % (1 << 22)
    )


def hidden_of(pairs: Pairs) -> float:
    """The fake head's hidden state after ``pairs``, which no feature of a target equals."""
    return feature_of([number for pair in pairs for number in pair]) + 0.5


class FakeEngine(_Engine):
    """A model whose argmax after a prefix is ``next_token(prefix)``; if that is an array, it is the logits."""

    def __init__(self, spec: ModelSpec, next_token: NextToken) -> None:
        super().__init__(model_contract(spec))
        self.next_token = next_token
        self.num_passes = 0

    def compute(self, host: Mapping[str, Array], width: int, rows: int) -> None:
        """Write the fed ids into the cache at their positions, then the logits of the requested rows.

        Raises ``ValueError`` for inputs with which a real model would give wrong logits.
        """
        self.num_passes += 1
        cache = host[past_name("key", 0)].reshape(-1)  # [capacity]
        start, indices = _checked(host, width, rows)
        cache[start : start + width] = host[INPUT_IDS][0, :width]
        for row in range(width if FEATURES in host else 0):
            host[FEATURES][row] = feature_of(cache[: start + row + 1].tolist())
        logits = host[LOGITS][:rows]  # [R, V]
        logits[:] = 0
        for row, index in enumerate(indices):
            prefix = cache[: start + int(index) + 1].astype(np.int64).tolist()
            following = self.next_token(prefix)
            if isinstance(following, np.ndarray):
                logits[row] = following
            else:
                logits[row, following] = 1


class FakeHead(_Engine):
    """A head whose argmax after pairs of features and ids is ``next_token(pairs)``; an array is the logits.

    Keys hold ids and values the features that were read.
    """

    def __init__(self, spec: ModelSpec, next_token: Callable[[Pairs], int | Array]) -> None:
        super().__init__(model_contract(spec))
        self.spec, self.next_token = spec, next_token
        self.widths: list[int] = []

    def compute(self, host: Mapping[str, Array], width: int, rows: int) -> None:
        """Read the features of the fed pairs, then write logits and hidden states of the requested rows."""
        self.widths.append(width)
        start, indices = _checked(host, width, rows)
        ids, features = (host[past_name(part, 0)].reshape(-1) for part in ("key", "value"))  # [capacity] each
        ids[start : start + width] = host[INPUT_IDS][0, :width]
        features[start : start + width] = host[FEATURE_CACHE][host[FEATURE_ROWS][:width], 0]
        host[LOGITS][:rows] = 0
        for row, index in enumerate(indices):
            end = start + int(index) + 1
            pairs = list(zip(features[:end].tolist(), ids[:end].astype(np.int64).tolist(), strict=True))
            host[HIDDEN][row] = hidden_of(pairs)
            following = self.next_token(pairs)
            if isinstance(following, np.ndarray):
                host[LOGITS][row] = following
            else:
                host[LOGITS][row, following] = 1


def _checked(host: Mapping[str, Array], width: int, rows: int) -> tuple[int, Array]:
    """(cached tokens, row indices) of a pass. Raises ``ValueError``."""
    start = int(host[TOTAL_SEQUENCE_LENGTH][0]) - width
    positions, last = host[POSITION_IDS][0, :width], int(host[SEQLENS_K][0])
    if start < 0 or not np.array_equal(positions, np.arange(start, start + width)) or last != start + width - 1:
        raise ValueError(f"positions {positions} and seqlens_k {last} do not follow {start} cached tokens")
    indices = host[ROW_INDICES][:rows]
    if indices.min() < 0 or indices.max() >= width:
        raise ValueError(f"row indices {indices} are not all in a pass of {width} tokens")
    return start, indices


class FakeSampler(_Engine):
    """A sampler that runs the numpy reference. ``vocab_size`` is the target's, by default that of ``spec``.

    With ``ties`` it chooses one of a row's largest logits at random, as a device's ArgMax may. The reference takes the
    first.
    """

    def __init__(
        self,
        spec: ModelSpec,
        name: str = samplers.MATCH,
        vocab_size: int | None = None,
        ties: np.random.Generator | None = None,
    ) -> None:
        vocab_size = spec.vocab_size if vocab_size is None else vocab_size
        super().__init__(samplers.sampler_contract(name, spec, vocab_size))
        self._compute, self._vocab_size, self._ties = _SAMPLERS[name], vocab_size, ties

    def compute(self, host: Mapping[str, Array], width: int, rows: int) -> None:
        """Verify the last ``rows`` rows of a pass of ``width`` tokens."""
        rows_of = {name: array[:rows] for name, array in host.items() if name in _BY_ROW}
        if self._ties is not None and LOGITS in rows_of:
            rows_of[LOGITS] = _without_ties(rows_of[LOGITS], self._ties)
        drafted = host[INPUT_IDS][0, :width][host[ROW_INDICES][1:rows]] if INPUT_IDS in host else np.zeros(0, np.int64)
        self._compute(rows_of, host, drafted, self._vocab_size)


def _without_ties(logits: Array, rng: np.random.Generator) -> Array:
    """A copy of ``logits`` [R, V] in which one of each row's largest values, any of them, is larger than the others."""
    result = logits.copy()
    for row in result:
        chosen = rng.choice(np.flatnonzero(row == row.max()))
        row[chosen] = np.nextafter(row[chosen], np.float32(np.inf))
    return result


# (the buffers' rows, all buffers, drafted ids [R - 1], the target's vocabulary) -> None
_Sampler = Callable[[Mapping[str, Array], Mapping[str, Array], Array, int], None]
_BY_ROW = frozenset(
    tensor.name
    for name in samplers.SAMPLER_NAMES
    for contract in [samplers.sampler_contract(name, fake_spec(), 1)]
    for tensor in (*contract.inputs, *contract.outputs)
    if tensor.shape[0] == ROWS
)


def _match(rows: Mapping[str, Array], host: Mapping[str, Array], drafted: Array, vocab_size: int) -> None:
    rows[TOKENS][:] = numpy_samplers.greedy(rows[LOGITS])
    host[NUM_ACCEPTED][0] = numpy_samplers.match(rows[TOKENS], drafted)


def _penalties(rows: Mapping[str, Array], host: Mapping[str, Array], drafted: Array, vocab_size: int) -> None:
    by_id = (samplers.CONTEXT_COUNTS, samplers.OUTPUT_COUNTS, samplers.LOGIT_BIAS, samplers.ENDING_LIMIT)
    scalars = (
        samplers.NUM_UNENDING_ROWS,
        samplers.REPETITION_PENALTY,
        samplers.PRESENCE_PENALTY,
        samplers.FREQUENCY_PENALTY,
    )
    arguments = [*(host[name] for name in by_id), *(host[name][0] for name in scalars)]
    rows[samplers.PROCESSED_LOGITS][:] = numpy_samplers.penalize(rows[LOGITS], drafted, *arguments)


def _softmax(rows: Mapping[str, Array], host: Mapping[str, Array], drafted: Array, vocab_size: int) -> None:
    probs = numpy_samplers.softmax(rows[LOGITS][:, :vocab_size], host[samplers.TEMPERATURE][0])
    _write_probs(rows, probs)


def _filter(rows: Mapping[str, Array], host: Mapping[str, Array], drafted: Array, vocab_size: int) -> None:
    names = (samplers.TEMPERATURE, samplers.TOP_K, samplers.TOP_P, samplers.MIN_P)
    probs = numpy_samplers.filtered(rows[LOGITS][:, :vocab_size], *(host[name][0] for name in names))
    _write_probs(rows, probs)
    rows[samplers.NUCLEUS_IS_LARGER][:] = 0  # numpy sorts them all


def _nucleus(rows: Mapping[str, Array], host: Mapping[str, Array], drafted: Array, vocab_size: int) -> None:
    raise AssertionError("the fake filter sorts all ids and flags no row")


def _write_probs(rows: Mapping[str, Array], probs: Array) -> None:
    rows[samplers.PROBS][:] = 0
    rows[samplers.PROBS][:, : probs.shape[1]] = probs


def _match_sampled(rows: Mapping[str, Array], host: Mapping[str, Array], drafted: Array, vocab_size: int) -> None:
    uniforms = rows[samplers.UNIFORMS][:, [samplers.CHUNK, samplers.WITHIN]]
    rows[TOKENS][:] = [numpy_samplers.draw(*row) for row in zip(rows[samplers.PROBS], *uniforms.T, strict=True)]
    host[NUM_ACCEPTED][0] = numpy_samplers.match(rows[TOKENS], drafted)


def _block(rows: Mapping[str, Array], host: Mapping[str, Array], drafted: Array, vocab_size: int) -> None:
    uniforms = rows[samplers.UNIFORMS]
    eta, final = uniforms[:-1, samplers.ACCEPT], (uniforms[0, samplers.CHUNK], uniforms[0, samplers.WITHIN])
    verdict = numpy_samplers.block(rows[samplers.PROBS], rows[samplers.DRAFT_PROBS][:-1], drafted, eta, final)
    host[NUM_ACCEPTED][0], rows[TOKENS][:] = verdict


def _logprobs(rows: Mapping[str, Array], host: Mapping[str, Array], drafted: Array, vocab_size: int) -> None:
    num_top = rows[samplers.TOP_IDS].shape[1]
    names = (samplers.TOKEN_LOGPROBS, samplers.TOP_LOGPROBS, samplers.TOP_IDS)
    for name, values in zip(
        names, numpy_samplers.logprobs(rows[LOGITS], rows[samplers.CHOSEN_IDS], num_top), strict=True
    ):
        rows[name][:] = values


_SAMPLERS: dict[str, _Sampler] = {
    samplers.MATCH: _match,
    samplers.PENALTIES: _penalties,
    samplers.SOFTMAX: _softmax,
    samplers.FILTER: _filter,
    samplers.FILTER_WIDE: _filter,
    samplers.NUCLEUS: _nucleus,
    samplers.MATCH_SAMPLED: _match_sampled,
    samplers.BLOCK: _block,
    samplers.LOGPROBS: _logprobs,
}
