"""The contracts of the samplers: small graphs that turn the logits of a pass into tokens, on the same device.

::

    logits -> penalties -> (processors on the host) -> softmax | filters -> match-sampled | block
       |                        |                                                 tokens, n
       +-> logprobs             +-> match (greedy)

Each arrow is a buffer that the next sampler is opened on. ``R`` rows are verified at once: row ``i`` of the logits
follows the id fed at ``row_indices[i]``, and the drafted id that it verifies is the one fed at ``row_indices[i + 1]``.
Reference in numpy: ``specrt.engines.numpy_samplers``.
"""

from __future__ import annotations

from collections.abc import Callable

from specrt.engines.contract import (
    FEATURE_ROWS,
    INPUT_IDS,
    LOGITS,
    NUM_ACCEPTED,
    POSITION_IDS,
    ROW_INDICES,
    ROWS,
    SEQLENS_K,
    TOKENS,
    TOTAL_SEQUENCE_LENGTH,
    WIDTH,
    Contract,
    ModelSpec,
    TensorSpec,
)

# Penalties, biases and bans; every row counts its own drafted prefix.
PROCESSED_LOGITS = "processed_logits"
CONTEXT_COUNTS = "context_counts"  # times an id occurs in prompt and output, up to the last committed token
OUTPUT_COUNTS = "output_counts"  # the same in the output alone
LOGIT_BIAS = "logit_bias"  # added to every row; -inf bans an id
ENDING_LIMIT = "ending_limit"  # upper limit in the first ``num_unending_rows`` rows: -inf where an id ends the text
NUM_UNENDING_ROWS = "num_unending_rows"
REPETITION_PENALTY = "repetition_penalty"
PRESENCE_PENALTY = "presence_penalty"
FREQUENCY_PENALTY = "frequency_penalty"

# Warping: logits to probabilities.
TEMPERATURE = "temperature"
TOP_K = "top_k"
TOP_P = "top_p"
MIN_P = "min_p"
PROBS = "probs"
THRESHOLD = "threshold"  # of logits / temperature: lower values are dropped; top-k's alone if the nucleus is larger
NUCLEUS_IS_LARGER = "nucleus_is_larger"  # 1 if ids beyond the sorted ones belong to it

# Verification.
DRAFT_PROBS = "draft_probs"  # row i: the distribution of drafted id i; the last row is not used
UNIFORMS = "uniforms"
NUM_UNIFORMS = 3
ACCEPT, CHUNK, WITHIN = range(NUM_UNIFORMS)  # columns: eta of the drafted id; the two levels of an inverse CDF

# The target's log-probabilities of chosen ids and of the most likely ones.
CHOSEN_IDS = "chosen_ids"
TOKEN_LOGPROBS = "token_logprobs"
TOP_LOGPROBS = "top_logprobs"
TOP_IDS = "top_ids"

# Tensors of models and samplers that the host writes. All others are computed on the device and stay there.
HOST_WRITTEN = frozenset(
    {
        *(INPUT_IDS, POSITION_IDS, SEQLENS_K, TOTAL_SEQUENCE_LENGTH, ROW_INDICES, FEATURE_ROWS),
        *(CONTEXT_COUNTS, OUTPUT_COUNTS, LOGIT_BIAS, ENDING_LIMIT, NUM_UNENDING_ROWS),
        *(REPETITION_PENALTY, PRESENCE_PENALTY, FREQUENCY_PENALTY),
        *(TEMPERATURE, TOP_K, TOP_P, MIN_P, UNIFORMS, CHOSEN_IDS),
    }
)

# Number of most likely ids that the first two filters sort; the last one finds its threshold by bisection.
NUM_SORTED, NUM_SORTED_WIDE = 128, 1024
MAX_TOP_LOGPROBS = 20


def _rows(name: str, columns: int) -> TensorSpec:
    return TensorSpec(name, "float32", (ROWS, columns))


def _scalar(name: str, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, dtype, (1,))


_FED = (TensorSpec(INPUT_IDS, "int64", (1, WIDTH)), TensorSpec(ROW_INDICES, "int64", (ROWS,)))
_VERIFIED = (TensorSpec(TOKENS, "int64", (ROWS,)), TensorSpec(NUM_ACCEPTED, "int64", (1,)))
_UNIFORMS = _rows(UNIFORMS, NUM_UNIFORMS)


def _match(spec: ModelSpec, vocab_size: int) -> Contract:
    return Contract((_rows(LOGITS, spec.vocab_size), *_FED), _VERIFIED, spec.limits)


def _penalties(spec: ModelSpec, vocab_size: int) -> Contract:
    by_id = (CONTEXT_COUNTS, OUTPUT_COUNTS, LOGIT_BIAS, ENDING_LIMIT)
    inputs = (
        _rows(LOGITS, spec.vocab_size),
        *_FED,
        *(TensorSpec(name, "float32", (spec.vocab_size,)) for name in by_id),
        _scalar(NUM_UNENDING_ROWS, "int64"),
        *map(_scalar, (REPETITION_PENALTY, PRESENCE_PENALTY, FREQUENCY_PENALTY)),
    )
    return Contract(inputs, (_rows(PROCESSED_LOGITS, spec.vocab_size),), spec.limits)


def _softmax(spec: ModelSpec, vocab_size: int) -> Contract:
    return Contract((_rows(LOGITS, spec.vocab_size), _scalar(TEMPERATURE)), (_rows(PROBS, vocab_size),), spec.limits)


def _filter(spec: ModelSpec, vocab_size: int) -> Contract:
    inputs = (
        _rows(LOGITS, spec.vocab_size),
        _scalar(TEMPERATURE),
        _scalar(TOP_K, "int64"),
        *map(_scalar, (TOP_P, MIN_P)),
    )
    outputs = (
        _rows(PROBS, vocab_size),
        TensorSpec(THRESHOLD, "float32", (ROWS,)),
        TensorSpec(NUCLEUS_IS_LARGER, "int64", (ROWS,)),
    )
    return Contract(inputs, outputs, spec.limits)


def _nucleus(spec: ModelSpec, vocab_size: int) -> Contract:
    inputs = (
        _rows(LOGITS, spec.vocab_size),
        *map(_scalar, (TEMPERATURE, TOP_P, MIN_P)),
        TensorSpec(THRESHOLD, "float32", (ROWS,)),
        TensorSpec(NUCLEUS_IS_LARGER, "int64", (ROWS,)),
    )
    return Contract(inputs, (_rows(PROBS, vocab_size),), spec.limits)


def _match_sampled(spec: ModelSpec, vocab_size: int) -> Contract:
    return Contract((_rows(PROBS, vocab_size), *_FED, _UNIFORMS), _VERIFIED, spec.limits)


def _block(spec: ModelSpec, vocab_size: int) -> Contract:
    inputs = (_rows(PROBS, vocab_size), _rows(DRAFT_PROBS, vocab_size), *_FED, _UNIFORMS)
    return Contract(inputs, _VERIFIED, spec.limits)


def _logprobs(spec: ModelSpec, vocab_size: int) -> Contract:
    num_top = min(MAX_TOP_LOGPROBS, spec.vocab_size)
    outputs = (
        TensorSpec(TOKEN_LOGPROBS, "float32", (ROWS,)),
        _rows(TOP_LOGPROBS, num_top),
        TensorSpec(TOP_IDS, "int64", (ROWS, num_top)),
    )
    inputs = (_rows(LOGITS, spec.vocab_size), TensorSpec(CHOSEN_IDS, "int64", (ROWS,)))
    return Contract(inputs, outputs, spec.limits)


MATCH, PENALTIES, SOFTMAX = "match", "penalties", "softmax"
FILTER, FILTER_WIDE, NUCLEUS = "filter", "filter-wide", "nucleus"
MATCH_SAMPLED, BLOCK, LOGPROBS = "match-sampled", "block", "logprobs"

_CONTRACTS: dict[str, Callable[[ModelSpec, int], Contract]] = {
    MATCH: _match,
    PENALTIES: _penalties,
    SOFTMAX: _softmax,
    FILTER: _filter,
    FILTER_WIDE: _filter,
    NUCLEUS: _nucleus,
    MATCH_SAMPLED: _match_sampled,
    BLOCK: _block,
    LOGPROBS: _logprobs,
}
SAMPLER_NAMES = tuple(_CONTRACTS)


def sampler_contract(name: str, spec: ModelSpec, vocab_size: int) -> Contract:
    """The contract of sampler ``name`` on the logits of the model of ``spec``.

    ``vocab_size`` is the target's: a draft's probabilities have the same number of columns, even if its vocabulary has
    another size. Raises ``ValueError`` for a name that is not one of ``SAMPLER_NAMES``.
    """
    if name not in _CONTRACTS:
        raise ValueError(f"sampler: got {name!r}, expected one of {', '.join(SAMPLER_NAMES)}")
    return _CONTRACTS[name](spec, vocab_size)
