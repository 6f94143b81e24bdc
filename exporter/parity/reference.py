"""Reference logits of the torch model on fixed ids, and the comparison of the exported graph with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from specrt.engines.contract import (
    FEATURE_CACHE,
    FEATURES,
    LOGITS,
    ONNXRUNTIME_DIALECT,
    STANDARD_DIALECTS,
    UNDRAFTED,
    ModelSpec,
    model_contract,
)
from specrt.engines.errors import ParityError
from specrt.engines.interface import Array, write_pass
from specrt.engines.manifest import LOGITS_TOLERANCE, Parity
from specrt.engines.ort.cpu import OrtEngine

NUM_POSITIONS = 48
MIN_DISTINCT_IDS = 16
MAX_QUANTIZATION_KL = 1.0
MAX_FEATURE_ERROR = 0.5  # of their norm, for quantized weights; those of another layer are further away
_TEXT = (
    "def area(radius):\n    return 3.14159 * radius ** 2\n\nThe quick brown fox jumps over the lazy dog. "
    "In 1969, two people walked on the Moon; twelve have done so since, and all came back. Why? "
)


def reference_ids(tokenizer: Any, vocab_size: int, max_seq_len: int = NUM_POSITIONS) -> Array:
    """Ids [N] i64: a fixed text, repeated, in the model's own tokens; 48, or ``max_seq_len`` where that is less.

    When the text has too few distinct ids, as with a tokenizer without Latin letters, the second half is ids spread
    over the vocabulary: logits on a single id could be those of many models.
    """
    ids = tokenizer(_TEXT, add_special_tokens=True)["input_ids"] or [0]
    chosen = np.resize(np.array(ids, np.int64), min(NUM_POSITIONS, max_seq_len)) % vocab_size
    if len(np.unique(chosen)) < min(MIN_DISTINCT_IDS, vocab_size, len(chosen) // 2):
        num = (len(chosen) + 1) // 2
        spread = np.arange(num) * vocab_size // num if vocab_size >= num else np.arange(num) % vocab_size
        chosen[-num:] = spread
    return chosen


def reference_logits(model: Any, ids: Array, dialect: str = ONNXRUNTIME_DIALECT) -> Array:
    """Logits [N, V] f32 of the torch model over ``ids``, with its own attention and without a cache.

    Two passes in a row must agree to the last bit: a pass of torch was once off by 1e-4 of the largest logit at some
    positions, and these logits are stored in the bundle. Raises ``ParityError``.
    """
    model.set_attn_implementation("eager")
    logits = whole_logits(model, ids)
    for _ in range(4):
        previous, logits = logits, whole_logits(model, ids)
        if not np.isfinite(logits).all():
            raise ParityError(f"the model's own logits in {model.dtype} are not finite; export in {wider(dialect)}")
        if np.array_equal(previous, logits):
            return logits
    raise ParityError("the torch model's logits differ in every pass, so no graph can be compared with them")


def wider(dialect: str) -> str:
    """The option for the dtype that overflows less."""
    return "--dtype bf16" if dialect in STANDARD_DIALECTS else "--dtype fp32"


def whole_logits(model: Any, ids: Array) -> Array:
    """Logits [N, V] f32 of one pass of the torch model over ``ids`` [N], without a cache."""
    with torch.no_grad():
        logits: Array = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].float().numpy()
    return logits


def save_reference(path: Path, ids: Array, logits: Array, features: Array | None = None) -> None:
    """``ids`` [N], ``positions`` [P] and their ``logits`` [P, V], for checks without torch.

    ``features`` [N, H] are those that a head reads.
    """
    num = len(ids)
    positions = np.unique([num // 6, num // 2, num - 1, num]) - 1 if num >= 6 else np.arange(num)
    read: dict[str, Any] = {} if features is None else {"features": features}
    np.savez(path, ids=ids, positions=positions, logits=logits[positions], **read)


def check_parity(
    graph: Path,
    spec: ModelSpec,
    ids: Array,
    expected: Array,
    threads: int,
    is_quantized: bool = False,
    features: Array | None = None,
) -> Parity:
    """Run the graph over ``ids`` in passes of different widths and compare with ``expected`` [N, V].

    ``features`` [N, H] are those that a target must write, or that a head reads. Raises ``ParityError`` when the
    difference is more than rounding, or, for quantized weights, when the KL divergence is above
    ``MAX_QUANTIZATION_KL``.
    """
    found = graph_outputs(graph, spec, ids, threads, is_quantized, features if spec.reads_features else None)
    got = found[LOGITS]
    if not np.isfinite(got).all():
        raise ParityError(f"{graph.name}: logits in {spec.dtype} are not finite; export in {wider(spec.dialect)}")
    known = expected[0] > UNDRAFTED
    if not np.array_equal(got[:, ~known], expected[:, ~known]):
        raise ParityError(f"{graph.name}: logits of ids outside the draft vocabulary; please report this head")
    got, expected = got[:, known], expected[:, known]
    error = float(np.abs(got - expected).max())
    scale = float(np.abs(expected).max())
    agreement = float((got.argmax(-1) == expected.argmax(-1)).mean())
    kl = mean_kl(expected, got)
    if is_quantized and kl > MAX_QUANTIZATION_KL:
        raise ParityError(
            f"{graph.name}: KL {kl:.2g} nats from the torch model after quantization (expected at most "
            f"{MAX_QUANTIZATION_KL:g}); use more bits"
        )
    if not is_quantized and error > LOGITS_TOLERANCE[spec.dtype] * scale:
        raise ParityError(
            f"{graph.name}: logits differ from the torch model by {error:.3g} (largest logit {scale:.3g}), more than "
            f"rounding in {spec.dtype}; please report this model"
        )
    if features is not None and not spec.reads_features:
        limit = MAX_FEATURE_ERROR if is_quantized else LOGITS_TOLERANCE[spec.dtype]
        _check_features(graph, found[FEATURES], features, limit)
    return Parity(len(ids), error, scale, agreement, kl)


def feature_error(got: Array, expected: Array) -> float:
    """The norm of the difference over that of ``expected``, of features [N, H]."""
    return float(np.linalg.norm(got.astype(np.float64) - expected) / np.linalg.norm(expected.astype(np.float64)))


def _check_features(graph: Path, got: Array, expected: Array, limit: float) -> None:
    error = feature_error(got, expected)
    if not error <= limit:
        raise ParityError(
            f"{graph.name}: features differ from the torch model's by {error:.2g} of their norm, expected at most "
            f"{limit:g}; please report this model"
        )


def mean_kl(expected: Array, got: Array) -> float:
    """Mean KL(expected || got) in nats of the distributions given by logits [N, V]."""
    theirs, ours = (torch.log_softmax(torch.from_numpy(logits).double(), dim=-1) for logits in (expected, got))
    return float(torch.nn.functional.kl_div(ours, theirs, reduction="batchmean", log_target=True))


def graph_logits(graph: Path, spec: ModelSpec, ids: Array, threads: int, prepack: bool = False) -> Array:
    """The logits [N, V] f32 of ``graph_outputs``."""
    return graph_outputs(graph, spec, ids, threads, prepack)[LOGITS]


def graph_outputs(
    graph: Path, spec: ModelSpec, ids: Array, threads: int, prepack: bool = False, features: Array | None = None
) -> dict[str, Array]:
    """Logits [N, V] f32 of an exported graph, by passes of 1 to ``max_rows`` rows on a growing cache.

    Those of a target with features have these too, [N, H]. A head reads ``features`` [N, H]. Without ``prepack`` the
    weights are not copied. Quantized weights need it, as at runtime: without it other kernels run, which do not round
    activations and are more accurate.
    """
    engine = OrtEngine(graph, model_contract(spec), threads, prepack)
    binding = engine.open()
    host = binding.host
    if features is not None:
        binding.write(FEATURE_CACHE, features)
    rows: dict[str, list[Array]] = {name: [] for name in (LOGITS, FEATURES) if name in host}
    start, width = 0, spec.max_rows
    while start < len(ids):
        count = min(width, len(ids) - start, spec.max_rows)
        write_pass(host, ids[start : start + count], start, count)
        binding.run(count, count)
        for name, found in rows.items():
            found.append(host[name][:count].copy())
        start, width = start + count, width - 1 or spec.max_rows
    binding.close()
    return {name: np.concatenate(found) for name, found in rows.items()}
