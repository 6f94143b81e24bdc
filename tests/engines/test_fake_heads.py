"""Each fake head against its oracle, whatever its buffers hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from specrt.engines import heads, oracle
from specrt.engines.fake import FakeHead, fake_spec
from specrt.engines.seam import Array
from specrt.engines.spec import (
    INPUT_IDS,
    LOGITS,
    NUM_ACCEPTED,
    ROW_INDICES,
    TOKENS,
)

SPEC = fake_spec(vocab_size=64, max_seq_len=32, k=4, max_width=8)
Buffers = Mapping[str, Array]


def filled(name: str, buffer: Array, vocab_size: int, width: int, rng: np.random.Generator) -> Array:
    """Something that ``buffer`` may hold at the start of a pass; what is beyond the pass is filled too."""
    shape = buffer.shape
    made: dict[str, Callable[[], object]] = {
        INPUT_IDS: lambda: rng.integers(0, vocab_size, shape),
        ROW_INDICES: lambda: np.sort(rng.permutation(width)[: shape[0]]),
        heads.PROBS: lambda: rng.dirichlet(np.full(shape[1], 0.3), shape[0]),
        heads.DRAFT_PROBS: lambda: rng.dirichlet(np.full(shape[1], 0.3), shape[0]),
        heads.UNIFORMS: lambda: rng.uniform(size=shape),
        heads.CONTEXT_COUNTS: lambda: rng.integers(0, 3, shape),
        heads.OUTPUT_COUNTS: lambda: rng.integers(0, 2, shape),
        heads.ENDING_LIMIT: lambda: np.where(rng.uniform(size=shape) < 0.2, -np.inf, np.inf),
        heads.NUM_UNENDING_ROWS: lambda: 2,
        heads.REPETITION_PENALTY: lambda: 1.3,
        heads.PRESENCE_PENALTY: lambda: 0.4,
        heads.FREQUENCY_PENALTY: lambda: 0.2,
        heads.TEMPERATURE: lambda: 0.8,
        heads.TOP_K: lambda: 9,
        heads.TOP_P: lambda: 0.7,
        heads.MIN_P: lambda: 0.02,
        heads.CHOSEN_IDS: lambda: rng.integers(0, vocab_size, shape),
    }
    values = made.get(name, lambda: rng.normal(0, 2, shape))()
    return np.broadcast_to(np.asarray(values, buffer.dtype), shape)


def padded(probs: Array, vocab_size: int) -> Array:
    """Ids that the model does not have are impossible."""
    return np.pad(probs, ((0, 0), (0, vocab_size - probs.shape[1])))


def fed(host: Buffers, rows: int) -> Array:
    """The drafted ids that ``rows`` rows judge. [R - 1]"""
    ids: Array = host[INPUT_IDS][0][host[ROW_INDICES][1:rows]]
    return ids


def by_match(host: Buffers, rows: int, vocab_size: int) -> dict[str, object]:
    tokens = oracle.greedy(host[LOGITS][:rows])
    return {TOKENS: tokens, NUM_ACCEPTED: [oracle.match(tokens, fed(host, rows))]}


def by_penalties(host: Buffers, rows: int, vocab_size: int) -> dict[str, object]:
    processed = oracle.penalize(
        logits=host[LOGITS][:rows],
        drafted=fed(host, rows),
        context_counts=host[heads.CONTEXT_COUNTS],
        output_counts=host[heads.OUTPUT_COUNTS],
        logit_bias=host[heads.LOGIT_BIAS],
        ending_limit=host[heads.ENDING_LIMIT],
        num_unending_rows=2,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
    )
    return {heads.PROCESSED_LOGITS: processed}


def by_softmax(host: Buffers, rows: int, vocab_size: int) -> dict[str, object]:
    return {heads.PROBS: padded(oracle.softmax(host[LOGITS][:rows, :vocab_size], 0.8), vocab_size)}


def by_filter(host: Buffers, rows: int, vocab_size: int) -> dict[str, object]:
    probs = oracle.filtered(host[LOGITS][:rows, :vocab_size], temperature=0.8, top_k=9, top_p=0.7, min_p=0.02)
    return {heads.PROBS: padded(probs, vocab_size), heads.NUCLEUS_IS_LARGER: np.zeros(rows)}


def by_match_sampled(host: Buffers, rows: int, vocab_size: int) -> dict[str, object]:
    uniforms = host[heads.UNIFORMS]
    tokens = [oracle.draw(host[heads.PROBS][row], uniforms[row, 1], uniforms[row, 2]) for row in range(rows)]
    return {TOKENS: tokens, NUM_ACCEPTED: [oracle.match(np.array(tokens), fed(host, rows))]}


def by_rule(rule: Callable[..., tuple[int, int]], host: Buffers, rows: int) -> dict[str, object]:
    """The next token is told in every row, where the accepted count finds it."""
    uniforms = host[heads.UNIFORMS]
    q, eta = host[heads.DRAFT_PROBS][: rows - 1], uniforms[: rows - 1, 0]
    accepted, token = rule(host[heads.PROBS][:rows], q, fed(host, rows), eta, (uniforms[0, 1], uniforms[0, 2]))
    return {TOKENS: [token] * rows, NUM_ACCEPTED: [accepted]}


def by_logprobs(host: Buffers, rows: int, vocab_size: int) -> dict[str, object]:
    names = (heads.TOKEN_LOGPROBS, heads.TOP_LOGPROBS, heads.TOP_IDS)
    found = oracle.logprobs(host[LOGITS][:rows], host[heads.CHOSEN_IDS][:rows], heads.MAX_TOP_LOGPROBS)
    return dict(zip(names, found, strict=True))


def likely_drafts(name: str, host: Buffers, rows: int, vocab_size: int, rng: np.random.Generator) -> list[int]:
    """Ids to draft so that every acceptance occurs; the draft's probabilities are brought near the target's."""
    likely = np.zeros(0, np.int64)
    if name in (heads.MATCH, heads.MATCH_SAMPLED):
        likely = np.asarray(ORACLES[name](host, rows, vocab_size)[TOKENS])[: rng.integers(rows)]
    elif name in (heads.TOKEN, heads.BLOCK):
        host[heads.DRAFT_PROBS][:] = (host[heads.DRAFT_PROBS] + host[heads.PROBS]) / 2
        likely = host[heads.DRAFT_PROBS][: rows - 1].argmax(axis=-1)
    ids: list[int] = likely.tolist()
    return ids


ORACLES: dict[str, Callable[[Buffers, int, int], dict[str, object]]] = {
    heads.MATCH: by_match,
    heads.PENALTIES: by_penalties,
    heads.SOFTMAX: by_softmax,
    heads.FILTER: by_filter,
    heads.FILTER_WIDE: by_filter,
    heads.MATCH_SAMPLED: by_match_sampled,
    heads.TOKEN: lambda host, rows, vocab_size: by_rule(oracle.token, host, rows),
    heads.BLOCK: lambda host, rows, vocab_size: by_rule(oracle.block, host, rows),
    heads.LOGPROBS: by_logprobs,
}


def test_every_head_that_is_asked_has_its_oracle_here() -> None:
    """The fake filters sort all ids and never flag a row for ``nucleus``."""
    assert {*ORACLES, heads.NUCLEUS} == set(heads.HEAD_NAMES)


@pytest.mark.parametrize("vocab_size", [SPEC.vocab_size, 50, 70], ids=["same", "narrower target", "wider target"])
@pytest.mark.parametrize("rows", range(1, SPEC.max_rows + 1))
@pytest.mark.parametrize("name", ORACLES)
def test_a_fake_head_is_its_oracle(name: str, rows: int, vocab_size: int) -> None:
    """Its outputs hold what the oracle says of the first rows; nothing else in its buffers changes."""
    width, seen = 7, set()
    for seed in range(30):
        rng = np.random.default_rng(seed)
        binding = FakeHead(SPEC, name, vocab_size).open(0)
        host = binding.host
        for tensor, buffer in host.items():
            buffer[:] = filled(tensor, buffer, min(vocab_size, SPEC.vocab_size), width, rng)
        for row, token in enumerate(likely_drafts(name, host, rows, vocab_size, rng)):
            host[INPUT_IDS][0, host[ROW_INDICES][row + 1]] = token
        before = {tensor: buffer.copy() for tensor, buffer in host.items()}
        binding.run(width, rows)
        expected = ORACLES[name](before, rows, vocab_size)
        for tensor, buffer in host.items():
            wanted = before[tensor]
            if tensor in expected:
                values = np.asarray(expected[tensor])
                wanted[: len(values)] = values
            np.testing.assert_array_equal(buffer, wanted, err_msg=tensor)
        seen.add(int(host[NUM_ACCEPTED][0]) if NUM_ACCEPTED in host else 0)
    assert seen == (set(range(rows)) if NUM_ACCEPTED in host else {0})
