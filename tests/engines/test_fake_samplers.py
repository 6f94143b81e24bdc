"""Each fake sampler against its reference, with arbitrary contents of its buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from specrt.engines import numpy_samplers, samplers
from specrt.engines.contract import (
    INPUT_IDS,
    LOGITS,
    NUM_ACCEPTED,
    ROW_INDICES,
    TOKENS,
)
from specrt.engines.fake import FakeSampler, fake_spec
from specrt.engines.interface import Array

SPEC = fake_spec(vocab_size=64, max_seq_len=32, k=4, max_width=8)
Buffers = Mapping[str, Array]


def filled(name: str, buffer: Array, vocab_size: int, width: int, rng: np.random.Generator) -> Array:
    """Something that ``buffer`` may hold at the start of a pass; what is beyond the pass is filled too."""
    shape = buffer.shape
    made: dict[str, Callable[[], object]] = {
        INPUT_IDS: lambda: rng.integers(0, vocab_size, shape),
        ROW_INDICES: lambda: np.sort(rng.permutation(width)[: shape[0]]),
        samplers.PROBS: lambda: rng.dirichlet(np.full(shape[1], 0.3), shape[0]),
        samplers.DRAFT_PROBS: lambda: rng.dirichlet(np.full(shape[1], 0.3), shape[0]),
        samplers.UNIFORMS: lambda: rng.uniform(size=shape),
        samplers.CONTEXT_COUNTS: lambda: rng.integers(0, 3, shape),
        samplers.OUTPUT_COUNTS: lambda: rng.integers(0, 2, shape),
        samplers.ENDING_LIMIT: lambda: np.where(rng.uniform(size=shape) < 0.2, -np.inf, np.inf),
        samplers.NUM_UNENDING_ROWS: lambda: 2,
        samplers.REPETITION_PENALTY: lambda: 1.3,
        samplers.PRESENCE_PENALTY: lambda: 0.4,
        samplers.FREQUENCY_PENALTY: lambda: 0.2,
        samplers.TEMPERATURE: lambda: 0.8,
        samplers.TOP_K: lambda: 9,
        samplers.TOP_P: lambda: 0.7,
        samplers.MIN_P: lambda: 0.02,
        samplers.CHOSEN_IDS: lambda: rng.integers(0, vocab_size, shape),
    }
    values = made.get(name, lambda: rng.normal(0, 2, shape))()
    return np.broadcast_to(np.asarray(values, buffer.dtype), shape)


def padded(probs: Array, vocab_size: int) -> Array:
    """Ids that the model does not have are impossible."""
    return np.pad(probs, ((0, 0), (0, vocab_size - probs.shape[1])))


def fed(host: Buffers, rows: int) -> Array:
    """The drafted ids that ``rows`` rows verify. [R - 1]"""
    ids: Array = host[INPUT_IDS][0][host[ROW_INDICES][1:rows]]
    return ids


def by_match(host: Buffers, rows: int, vocab_size: int) -> dict[str, object]:
    tokens = numpy_samplers.greedy(host[LOGITS][:rows])
    return {TOKENS: tokens, NUM_ACCEPTED: [numpy_samplers.match(tokens, fed(host, rows))]}


def by_penalties(host: Buffers, rows: int, vocab_size: int) -> dict[str, object]:
    processed = numpy_samplers.penalize(
        logits=host[LOGITS][:rows],
        drafted=fed(host, rows),
        context_counts=host[samplers.CONTEXT_COUNTS],
        output_counts=host[samplers.OUTPUT_COUNTS],
        logit_bias=host[samplers.LOGIT_BIAS],
        ending_limit=host[samplers.ENDING_LIMIT],
        num_unending_rows=2,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
    )
    return {samplers.PROCESSED_LOGITS: processed}


def by_softmax(host: Buffers, rows: int, vocab_size: int) -> dict[str, object]:
    return {samplers.PROBS: padded(numpy_samplers.softmax(host[LOGITS][:rows, :vocab_size], 0.8), vocab_size)}


def by_filter(host: Buffers, rows: int, vocab_size: int) -> dict[str, object]:
    probs = numpy_samplers.filtered(host[LOGITS][:rows, :vocab_size], temperature=0.8, top_k=9, top_p=0.7, min_p=0.02)
    return {samplers.PROBS: padded(probs, vocab_size), samplers.NUCLEUS_IS_LARGER: np.zeros(rows)}


def by_match_sampled(host: Buffers, rows: int, vocab_size: int) -> dict[str, object]:
    uniforms = host[samplers.UNIFORMS]
    tokens = [numpy_samplers.draw(host[samplers.PROBS][row], uniforms[row, 1], uniforms[row, 2]) for row in range(rows)]
    return {TOKENS: tokens, NUM_ACCEPTED: [numpy_samplers.match(np.array(tokens), fed(host, rows))]}


def by_block(host: Buffers, rows: int, vocab_size: int) -> dict[str, object]:
    """The next token is in every row, where the accepted count finds it."""
    uniforms = host[samplers.UNIFORMS]
    q, eta = host[samplers.DRAFT_PROBS][: rows - 1], uniforms[: rows - 1, 0]
    p, final = host[samplers.PROBS][:rows], (uniforms[0, 1], uniforms[0, 2])
    accepted, token = numpy_samplers.block(p, q, fed(host, rows), eta, final)
    return {TOKENS: [token] * rows, NUM_ACCEPTED: [accepted]}


def by_logprobs(host: Buffers, rows: int, vocab_size: int) -> dict[str, object]:
    names = (samplers.TOKEN_LOGPROBS, samplers.TOP_LOGPROBS, samplers.TOP_IDS)
    found = numpy_samplers.logprobs(host[LOGITS][:rows], host[samplers.CHOSEN_IDS][:rows], samplers.MAX_TOP_LOGPROBS)
    return dict(zip(names, found, strict=True))


def likely_drafts(name: str, host: Buffers, rows: int, vocab_size: int, rng: np.random.Generator) -> list[int]:
    """Ids to draft so that every acceptance occurs; the draft's probabilities are brought near the target's."""
    likely = np.zeros(0, np.int64)
    if name in (samplers.MATCH, samplers.MATCH_SAMPLED):
        likely = np.asarray(REFERENCES[name](host, rows, vocab_size)[TOKENS])[: rng.integers(rows)]
    elif name == samplers.BLOCK:
        host[samplers.DRAFT_PROBS][:] = (host[samplers.DRAFT_PROBS] + host[samplers.PROBS]) / 2
        likely = host[samplers.DRAFT_PROBS][: rows - 1].argmax(axis=-1)
    ids: list[int] = likely.tolist()
    return ids


REFERENCES: dict[str, Callable[[Buffers, int, int], dict[str, object]]] = {
    samplers.MATCH: by_match,
    samplers.PENALTIES: by_penalties,
    samplers.SOFTMAX: by_softmax,
    samplers.FILTER: by_filter,
    samplers.FILTER_WIDE: by_filter,
    samplers.MATCH_SAMPLED: by_match_sampled,
    samplers.BLOCK: by_block,
    samplers.LOGPROBS: by_logprobs,
}


def test_every_sampler_has_a_reference_here() -> None:
    """The fake filters sort all ids and never flag a row for ``nucleus``."""
    assert {*REFERENCES, samplers.NUCLEUS} == set(samplers.SAMPLER_NAMES)


@pytest.mark.parametrize("vocab_size", [SPEC.vocab_size, 50, 70], ids=["same", "narrower target", "wider target"])
@pytest.mark.parametrize("rows", range(1, SPEC.max_rows + 1))
@pytest.mark.parametrize("name", REFERENCES)
def test_a_fake_sampler_equals_its_reference(name: str, rows: int, vocab_size: int) -> None:
    """Its outputs are the reference's for the first rows; nothing else in its buffers changes."""
    width, seen = 7, set()
    for seed in range(30):
        rng = np.random.default_rng(seed)
        binding = FakeSampler(SPEC, name, vocab_size).open()
        host = binding.host
        for tensor, buffer in host.items():
            buffer[:] = filled(tensor, buffer, min(vocab_size, SPEC.vocab_size), width, rng)
        for row, token in enumerate(likely_drafts(name, host, rows, vocab_size, rng)):
            host[INPUT_IDS][0, host[ROW_INDICES][row + 1]] = token
        before = {tensor: buffer.copy() for tensor, buffer in host.items()}
        binding.run(width, rows)
        expected = REFERENCES[name](before, rows, vocab_size)
        for tensor, buffer in host.items():
            wanted = before[tensor]
            if tensor in expected:
                values = np.asarray(expected[tensor])
                wanted[: len(values)] = values
            np.testing.assert_array_equal(buffer, wanted, err_msg=tensor)
        seen.add(int(host[NUM_ACCEPTED][0]) if NUM_ACCEPTED in host else 0)
    assert seen == (set(range(rows)) if NUM_ACCEPTED in host else {0})
