"""The samplers that warp logits against the numpy reference, in the target's vocabulary for any model's."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specrt.engines import numpy_samplers
from specrt.engines.contract import LOGITS
from specrt.engines.samplers import (
    CHOSEN_IDS,
    CONTEXT_COUNTS,
    ENDING_LIMIT,
    FREQUENCY_PENALTY,
    LOGIT_BIAS,
    LOGPROBS,
    MAX_TOP_LOGPROBS,
    NUM_UNENDING_ROWS,
    OUTPUT_COUNTS,
    PENALTIES,
    PRESENCE_PENALTY,
    PROBS,
    PROCESSED_LOGITS,
    REPETITION_PENALTY,
    SOFTMAX,
    TEMPERATURE,
    TOKEN_LOGPROBS,
    TOP_IDS,
    TOP_LOGPROBS,
)
from tests.exporter.samplers.samplers_on_ort import (
    PAIRS,
    TOLERANCE,
    VOCAB_SIZES,
    fed,
    in_target,
    random_logits,
    row_counts,
    sampler,
    scalar,
    scales,
    seeds,
    temperatures,
)

# --- penalties -----------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(
    seeds, st.sampled_from(VOCAB_SIZES), row_counts, st.sampled_from([0.5, 1.0, 1.3]), st.sampled_from([-1.0, 0.0, 0.7])
)
def test_penalties_equal_the_reference(
    seed: int, vocab_size: int, rows: int, repetition: float, presence: float
) -> None:
    rng = np.random.default_rng(seed)
    logits = random_logits(rng, rows, vocab_size, 3.0)
    drafted = rng.integers(0, min(vocab_size, 5), rows - 1)
    output = rng.poisson(0.3, vocab_size).astype(np.float32)
    context = output + rng.poisson(0.1, vocab_size).astype(np.float32)
    bias = np.where(rng.random(vocab_size) < 0.1, -np.inf, rng.normal(size=vocab_size)).astype(np.float32)
    ending = np.where(rng.random(vocab_size) < 0.1, -np.inf, np.inf).astype(np.float32)
    frequency, num_unending = rng.normal(), int(rng.integers(0, rows + 2))
    outputs = sampler(PENALTIES, vocab_size).run(
        {
            LOGITS: logits,
            **fed(drafted, rng, vocab_size),
            CONTEXT_COUNTS: context,
            OUTPUT_COUNTS: output,
            LOGIT_BIAS: bias,
            ENDING_LIMIT: ending,
            NUM_UNENDING_ROWS: scalar(num_unending, "int64"),
            REPETITION_PENALTY: scalar(repetition),
            PRESENCE_PENALTY: scalar(presence),
            FREQUENCY_PENALTY: scalar(frequency),
        }
    )
    expected = numpy_samplers.penalize(
        logits, drafted, context, output, bias, ending, num_unending, repetition, presence, frequency
    )
    np.testing.assert_allclose(outputs[PROCESSED_LOGITS], expected, atol=TOLERANCE, rtol=1e-6)


# --- softmax -------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(seeds, st.sampled_from(PAIRS), row_counts, temperatures, scales)
def test_softmax_equals_the_reference(
    seed: int, sizes: tuple[int, int], rows: int, temperature: float, scale: float
) -> None:
    logits = random_logits(np.random.default_rng(seed), rows, sizes[0], scale)
    logits[:, 0] = 1.0
    probs = sampler(SOFTMAX, *sizes).run({LOGITS: logits, TEMPERATURE: scalar(temperature)})[PROBS]
    np.testing.assert_allclose(
        probs, numpy_samplers.softmax(in_target(logits, sizes[1]), temperature), atol=TOLERANCE, rtol=0
    )
    assert (probs[:, sizes[0] :] == 0).all()


# --- log-probabilities ---------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(seeds, st.sampled_from(VOCAB_SIZES), row_counts, scales)
def test_log_probabilities_equal_the_reference(seed: int, vocab_size: int, rows: int, scale: float) -> None:
    """Logits are multiples of 1/64: they tie, or differ by more than rounding."""
    rng = np.random.default_rng(seed)
    logits = (np.round(rng.normal(0, scale, (rows, vocab_size)) * 64) / 64).astype(np.float32)
    chosen = rng.integers(0, vocab_size, rows)
    outputs = sampler(LOGPROBS, vocab_size).run({LOGITS: logits, CHOSEN_IDS: chosen})
    expected = numpy_samplers.logprobs(logits, chosen, min(MAX_TOP_LOGPROBS, vocab_size))
    np.testing.assert_allclose(outputs[TOKEN_LOGPROBS], expected[0], atol=TOLERANCE, rtol=1e-6)
    np.testing.assert_allclose(outputs[TOP_LOGPROBS], expected[1], atol=TOLERANCE, rtol=1e-6)
    np.testing.assert_array_equal(outputs[TOP_IDS], expected[2])
