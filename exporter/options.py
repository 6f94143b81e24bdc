"""The options of ``specrt export``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specrt.engines.backends import choose_device
from specrt.engines.contract import DIALECTS, ONNXRUNTIME_DIALECT, STANDARD_22_DIALECT, STANDARD_DIALECT
from specrt.engines.dialects import dialect_of_tensorrt, dialects_of
from specrt.engines.errors import UsageError
from specrt.engines.interface import CPU, CUDA
from specrt.exporter.heads.config import NUM_TAPS
from specrt.exporter.quantization.blocks import BLOCK_SIZES, QUANTIZATIONS
from specrt.exporter.quantization.qdq import LAYOUTS

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# The dtypes that each dialect runs on a device, the default first, and why it does not run others.
_DTYPES = {
    (ONNXRUNTIME_DIALECT, CPU): (("fp32", "fp16"), "on the CPU it has no bf16 kernels"),
    (ONNXRUNTIME_DIALECT, CUDA): (("fp16",), "on CUDA its attention takes no fp32, and bf16 is for TensorRT"),
    (STANDARD_DIALECT, CUDA): (("fp16", "bf16"), "its fused attention takes no fp32"),
    (STANDARD_22_DIALECT, CUDA): (("fp16", "bf16"), "as for later versions of TensorRT"),
}
# The quantizations of each dialect, and the dtypes of activations that they work with.
_DIALECT_QUANTIZATIONS: dict[str, dict[str, tuple[str, ...]]] = {
    ONNXRUNTIME_DIALECT: {
        name: ("fp32", "fp16") if row.block_size else ("fp32",) for name, row in QUANTIZATIONS.items()
    },
    STANDARD_DIALECT: dict.fromkeys(LAYOUTS, ("fp16", "bf16")),
    STANDARD_22_DIALECT: {"int8": ("fp16", "bf16")},  # no blocks before opset 21
}
MODEL_FREE_DRAFTS = ("ngram", "self")
SKIP = "skip"
HEAD = "eagle3"
NORMS = ("none", "fc", "fc-each", "residual", "output")
DEFAULT_MAX_SEQ_LEN = 2048


@dataclass(frozen=True)
class ExportOptions:
    """The options of one export, checked when they are made.

    ``max_seq_len`` None means 2048, or the model's context where shorter. ``device`` None is the backend's first one;
    ``dtype`` None is fp32, on a GPU fp16. ``block_size`` is of quantized matmuls of backend onnxruntime; None is 32.
    ``draft_vocab`` None lets the draft propose every id of its vocabulary. ``adapter`` is merged into the target;
    ``no_adapter`` ignores an adapter in the model's folder. ``taps`` and ``norm`` name the variant of a head
    (``specrt.exporter.heads.config.HeadVariant``), in place of its config. ``feature_taps`` is for programs only: the
    target writes these hidden states, concatenated, as its features, and has no draft model. ``tensorrt_version``, as
    in ``10.3``, is the library's that will run a bundle for ``tensorrt``; None is the current one.
    """

    target: str
    output: Path
    draft: str = "ngram"
    num_speculative_tokens: int = 5
    max_seq_len: int | None = None
    prefill_chunk: int = 512
    dtype: str | None = None
    draft_dtype: str | None = None
    quantize: str = "none"
    draft_quantize: str = "none"
    block_size: int | None = None
    draft_vocab: int | None = None
    taps: tuple[int, ...] = ()
    norm: tuple[str, ...] = ()
    feature_taps: tuple[int, ...] = ()
    backend: str = "onnxruntime"
    device: str | None = None
    tensorrt_version: str | None = None
    revision: str | None = None
    draft_revision: str | None = None
    adapter: str | None = None
    adapter_revision: str | None = None
    no_adapter: bool = False
    trust_remote_code: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_speculative_tokens <= 32:
            raise UsageError(f"--num-speculative-tokens {self.num_speculative_tokens}: expected 1 to 32")
        if self.max_seq_len is not None and self.max_seq_len < 16:
            raise UsageError(f"--max-seq-len {self.max_seq_len}: expected 16 or more")
        if self.prefill_chunk < self.num_speculative_tokens + 2:
            raise UsageError(f"--prefill-chunk {self.prefill_chunk}: expected at least K + 2")
        if self.backend not in DIALECTS:
            raise UsageError(f"--backend {self.backend}: expected {', '.join(DIALECTS)}")
        object.__setattr__(self, "device", choose_device(self.backend, self.device))
        if self.tensorrt_version is not None and self.backend != "tensorrt":
            raise UsageError(f"--tensorrt-version {self.tensorrt_version}: it is for --backend tensorrt; leave it out")
        self._check_dtypes()
        self._check_quantization()
        self._check_block_size()
        self._check_cut_draft()
        self._check_head()

    @property
    def dialect(self) -> str:
        return DIALECTS[self.backend] if self.tensorrt_version is None else dialect_of_tensorrt(self.tensorrt_version)

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends that can run the bundle, the requested one first."""
        return (self.backend, *(b for b in DIALECTS if self.dialect in dialects_of(b) and b != self.backend))

    def dtype_of(self, role: str) -> str:
        """The contract's name of the dtype of ``target`` or ``draft``."""
        assert self.dtype is not None, "set when the options are made"
        return DTYPES[self.dtype if role == "target" else self.draft_dtype or self.dtype]

    @property
    def head(self) -> str | None:
        """The folder or hub id of ``--draft eagle3:PATH_OR_HUB_ID``."""
        name, _, place = self.draft.partition(":")
        return place and str(Path(place).expanduser()) if name == HEAD else None

    @property
    def num_draft_layers(self) -> int | None:
        """N of ``--draft skip:N``."""
        name, _, number = self.draft.partition(":")
        return int(number) if name == SKIP else None

    @property
    def is_draft_of_target(self) -> bool:
        """Whether the draft is made from the target's own weights."""
        return self.draft.partition(":")[0] in ("self", SKIP)

    @property
    def shares_kv(self) -> bool:
        """Whether the draft can read the target's KV cache: it has the same layers, in any quantization.

        A cache that changes place in every pass is not shared.
        """
        has_place = self.dialect != STANDARD_22_DIALECT
        return has_place and self.draft.startswith("self:") and self.draft_dtype in (None, self.dtype)

    def _check_cut_draft(self) -> None:
        name, _, number = self.draft.partition(":")
        if name == SKIP:
            if not number.isascii() or not number.isdigit() or int(number) < 1:
                raise UsageError(f"--draft {self.draft}: expected skip:N, N of the target's layers, as in skip:12")
            for option, value in (
                ("--draft-quantize", self.draft_quantize != "none"),
                ("--draft-dtype", self.draft_dtype not in (None, self.dtype)),
                ("--draft-vocab", self.draft_vocab is not None),
            ):
                if value:
                    raise UsageError(
                        f"{option}: --draft {self.draft} uses the target's weights as they are; leave it out"
                    )
        if self.draft_vocab is not None:
            if self.draft in MODEL_FREE_DRAFTS:
                raise UsageError(f"--draft-vocab {self.draft_vocab}: draft {self.draft} has no head of its own")
            if self.draft_vocab < 2:
                raise UsageError(f"--draft-vocab {self.draft_vocab}: expected 2 or more")

    def _check_head(self) -> None:
        if self.head is None:
            for option, given in (("--taps", self.taps), ("--norm", self.norm)):
                if given:
                    raise UsageError(
                        f"{option} {','.join(map(str, given))}: only for --draft {HEAD}:HEAD; leave it out"
                    )
            if self.feature_taps and self.draft != "ngram":
                raise UsageError(f"feature_taps {self.feature_taps}: got draft {self.draft}, expected ngram")
            return
        if not self.head:
            raise UsageError(f"--draft {self.draft}: expected {HEAD}:PATH_OR_HUB_ID")
        for option, wrong, reason in (
            ("--draft-dtype", self.draft_dtype not in (None, self.dtype), "a head has the target's dtype"),
            ("--draft-vocab", self.draft_vocab is not None, "a head has its own draft vocabulary"),
            ("feature_taps", bool(self.feature_taps), "the features are the head's"),
        ):
            if wrong:
                raise UsageError(f"{option}: {reason}; leave it out")
        if unknown := sorted(set(self.norm) - set(NORMS)):
            raise UsageError(f"--norm {unknown[0]}: expected {', '.join(NORMS)}")
        if len(set(self.norm) & {"none", "fc", "fc-each"}) > 1:
            raise UsageError(f"--norm {' --norm '.join(self.norm)}: none, fc and fc-each exclude each other")
        if self.taps and len(self.taps) != NUM_TAPS:
            raise UsageError(
                f"--taps {','.join(map(str, self.taps))}: expected {NUM_TAPS} hidden states, as in 2,15,27"
            )

    def _check_dtypes(self) -> None:
        assert self.device is not None, "set before"
        dtypes, reason = _DTYPES[self.dialect, self.device]
        if self.dtype is None:
            object.__setattr__(self, "dtype", dtypes[0])
        for option, dtype in (("--dtype", self.dtype), ("--draft-dtype", self.draft_dtype or self.dtype)):
            if dtype not in dtypes:
                expected = ", ".join(dtypes)
                raise UsageError(f"{option} {dtype}: backend {self.backend} runs {expected} ({reason}); choose one")

    def _check_quantization(self) -> None:
        known = tuple(_DIALECT_QUANTIZATIONS[self.dialect])
        name, _, quantize = self.draft.partition(":")
        if name == "self" and quantize:
            if quantize not in known:
                expected = ", ".join(f"self:{q}" for q in known)
                raise UsageError(f"--draft {self.draft}: expected self, {expected} with backend {self.backend}")
            if self.draft_quantize not in ("none", quantize):
                raise UsageError(f"--draft {self.draft}: got --draft-quantize {self.draft_quantize} too; leave one out")
            object.__setattr__(self, "draft_quantize", quantize)
        elif self.draft in MODEL_FREE_DRAFTS and self.draft_quantize != "none":
            raise UsageError(f"--draft-quantize {self.draft_quantize}: draft {self.draft} has no weights of its own")
        self._check_stored_as("--quantize", self.quantize, self.dtype)
        self._check_stored_as("--draft-quantize", self.draft_quantize, self.draft_dtype or self.dtype)

    def _check_stored_as(self, option: str, quantize: str, dtype: str | None) -> None:
        """Raise ``UsageError`` unless the dialect has weights stored as ``quantize`` with activations in ``dtype``."""
        rows = _DIALECT_QUANTIZATIONS[self.dialect]
        if quantize not in ("none", *rows):
            expected = ", ".join(("none", *rows))
            raise UsageError(f"{option} {quantize}: expected {expected} with backend {self.backend}")
        if quantize != "none" and dtype not in rows[quantize]:
            dtypes = " or ".join(rows[quantize])
            raise UsageError(f"{option} {quantize}: its activations are {dtypes}, got {dtype}; choose another of both")

    def _check_block_size(self) -> None:
        if self.block_size is None:
            return
        if self.block_size not in BLOCK_SIZES:
            raise UsageError(f"--block-size {self.block_size}: expected {', '.join(map(str, BLOCK_SIZES))}")
        if self.dialect != ONNXRUNTIME_DIALECT:
            raise UsageError(f"--block-size {self.block_size}: backend {self.backend} has blocks of 32; leave it out")
        if not {self.quantize, self.draft_quantize} & {name for name, row in QUANTIZATIONS.items() if row.block_size}:
            raise UsageError(f"--block-size {self.block_size}: no weights are in blocks; add --quantize int4 or int8")
