"""The options of ``specrt export``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specrt.engines.contract import DIALECTS, ONNXRUNTIME_DIALECT, STANDARD_22_DIALECT, STANDARD_DIALECT
from specrt.engines.dialects import dialect_of_tensorrt, dialects_of
from specrt.engines.errors import UsageError
from specrt.exporter.quantization.blocks import QUANTIZATIONS
from specrt.exporter.quantization.qdq import LAYOUTS

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# The dtypes that each dialect's backends run, the default first, and why they do not run others.
_DIALECT_DTYPES = {
    ONNXRUNTIME_DIALECT: (("fp32", "fp16"), "on the CPU it has no bf16 kernels"),
    STANDARD_DIALECT: (("fp16", "bf16"), "its fused attention takes no fp32"),
    STANDARD_22_DIALECT: (("fp16", "bf16"), "as for later versions of TensorRT"),
}
# The quantizations of each dialect, the dtypes of activations that they work with, and why only these.
_DIALECT_QUANTIZATIONS = {
    ONNXRUNTIME_DIALECT: (tuple(QUANTIZATIONS), ("fp32",), "its activations are fp32"),
    STANDARD_DIALECT: (tuple(LAYOUTS), ("fp16", "bf16"), "its activations are fp16 or bf16"),
    STANDARD_22_DIALECT: (("int8",), ("fp16", "bf16"), "its activations are fp16 or bf16"),  # no blocks before opset 21
}
MODEL_FREE_DRAFTS = ("ngram", "self")
SKIP = "skip"
DEFAULT_MAX_SEQ_LEN = 2048


@dataclass(frozen=True)
class ExportOptions:
    """The options of one export, checked when they are made.

    ``max_seq_len`` None means 2048, or the model's context where shorter; ``dtype`` None is fp32, with TensorRT fp16.
    ``draft_vocab`` None lets the draft propose every id of its vocabulary. ``adapter`` is merged into the target;
    ``no_adapter`` ignores an adapter in the model's folder. ``tensorrt_version``, as in ``10.3``, is the library's that
    will run a bundle for ``tensorrt``; None is the current one.
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
    draft_vocab: int | None = None
    backend: str = "onnxruntime"
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
        if self.tensorrt_version is not None and self.backend != "tensorrt":
            raise UsageError(f"--tensorrt-version {self.tensorrt_version}: it is for --backend tensorrt; leave it out")
        self._check_dtypes()
        self._check_quantization()
        self._check_cut_draft()

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

    def _check_dtypes(self) -> None:
        dtypes, reason = _DIALECT_DTYPES[self.dialect]
        if self.dtype is None:
            object.__setattr__(self, "dtype", dtypes[0])
        for option, dtype in (("--dtype", self.dtype), ("--draft-dtype", self.draft_dtype or self.dtype)):
            if dtype not in dtypes:
                expected = ", ".join(dtypes)
                raise UsageError(f"{option} {dtype}: backend {self.backend} runs {expected} ({reason}); choose one")

    def _check_quantization(self) -> None:
        known = _DIALECT_QUANTIZATIONS[self.dialect][0]
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
        known, dtypes, reason = _DIALECT_QUANTIZATIONS[self.dialect]
        if quantize not in ("none", *known):
            expected = ", ".join(("none", *known))
            raise UsageError(f"{option} {quantize}: expected {expected} with backend {self.backend}")
        if quantize != "none" and dtype not in dtypes:
            raise UsageError(f"{option} {quantize}: {reason}, got {dtype}; leave the dtype out")
