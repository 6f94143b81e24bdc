"""The match sampler on ONNX Runtime against the numpy reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from specrt.engines import numpy_samplers
from specrt.engines.contract import (
    INPUT_IDS,
    LOGITS,
    NUM_ACCEPTED,
    ROW_INDICES,
    TOKENS,
)
from specrt.engines.interface import Array
from specrt.engines.ort.cpu import OrtEngine
from tests.engines.ort.attention_model import (
    SPEC,
    match_sampler,
)


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> OrtEngine:
    return match_sampler(tmp_path_factory.mktemp("samplers"))


@st.composite
def judgements(draw: st.DrawFn, rows: int) -> tuple[Array, list[int], list[int]]:
    """Logits [R, V] of few different values, the ids of a pass at least as wide, and which of them are the rows.

    Drafted ids are the target's own tokens more often than not, so that every acceptance occurs.
    """
    values = st.sampled_from([-np.inf, -3.0, 0.0, 1.0, 2.0]).map(float)
    logits = draw(st_numpy.arrays(np.float32, (rows, SPEC.vocab_size), elements=values, fill=st.just(-3.0)))
    width = draw(st.integers(rows, 14))
    indices = sorted(draw(st.permutations(range(width)))[:rows])
    ids = draw(st.lists(st.integers(0, SPEC.vocab_size - 1), min_size=width, max_size=width))
    for row in range(rows - 1):
        if draw(st.integers(0, 3)):
            ids[indices[row + 1]] = int(np.argmax(logits[row]))
    return logits, ids, indices


@pytest.mark.parametrize("rows", range(1, 10))
@settings(max_examples=40)
@given(data=st.data())
def test_the_match_sampler_equals_the_reference(sampler: OrtEngine, rows: int, data: st.DataObject) -> None:
    logits, ids, indices = data.draw(judgements(rows))
    binding = sampler.open()
    try:
        binding.host[LOGITS][:rows] = logits
        binding.host[INPUT_IDS][0, : len(ids)] = ids
        binding.host[ROW_INDICES][:rows] = indices
        binding.run(len(ids), rows)
        tokens = numpy_samplers.greedy(logits)
        accepted = numpy_samplers.match(tokens, np.array(ids)[indices][1:])
        assert binding.host[TOKENS][:rows].tolist() == tokens.tolist()
        assert binding.host[NUM_ACCEPTED].tolist() == [accepted]
    finally:
        binding.close()


@pytest.mark.parametrize("rows", range(1, 10))
def test_the_match_sampler_at_every_acceptance(sampler: OrtEngine, rows: int) -> None:
    """Tokens 1, 2, .., R are the target's own; the first wrong draft is at each position in turn."""
    binding = sampler.open()
    binding.host[LOGITS][:rows] = np.eye(SPEC.vocab_size)[1 : rows + 1]
    binding.host[ROW_INDICES][:rows] = np.arange(2, rows + 2)
    for accepted in range(rows):
        ids = [0, 0, *range(rows)]
        if accepted < rows - 1:
            ids[accepted + 3] = 31
        binding.host[INPUT_IDS][0, : len(ids)] = ids
        binding.run(len(ids), rows)
        assert binding.host[TOKENS][:rows].tolist() == list(range(1, rows + 1))
        assert binding.host[NUM_ACCEPTED].tolist() == [accepted]
    binding.close()
