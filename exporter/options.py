"""What ``specrt export`` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specrt.engines.errors import UsageError
from specrt.exporter.passes.quantize import QUANTIZATIONS

BACKENDS = ("onnxruntime",)
DTYPES = {"fp32": "float32", "fp16": "float16"}
MODEL_FREE_DRAFTS = ("ngram", "self")
DEFAULT_MAX_SEQ_LEN = 2048


@dataclass(frozen=True)
class ExportOptions:
    """What ``specrt export`` was asked for. ``max_seq_len`` None means 2048, or the model's context where shorter."""

    target: str
    output: Path
    draft: str = "ngram"
    num_speculative_tokens: int = 5
    max_seq_len: int | None = None
    prefill_chunk: int = 512
    dtype: str = "fp32"
    draft_dtype: str | None = None
    quantize: str = "none"
    draft_quantize: str = "none"
    backend: str = "onnxruntime"
    revision: str | None = None
    draft_revision: str | None = None
    trust_remote_code: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_speculative_tokens <= 32:
            raise UsageError(f"--num-speculative-tokens {self.num_speculative_tokens}: expected 1 to 32")
        if self.max_seq_len is not None and self.max_seq_len < 16:
            raise UsageError(f"--max-seq-len {self.max_seq_len}: expected 16 or more")
        if self.prefill_chunk < self.num_speculative_tokens + 2:
            raise UsageError(f"--prefill-chunk {self.prefill_chunk}: expected at least K + 2")
        for option, dtype in (("--dtype", self.dtype), ("--draft-dtype", self.draft_dtype or self.dtype)):
            if dtype not in DTYPES:
                raise UsageError(
                    f"{option} {dtype}: backend {self.backend} on the CPU runs {', '.join(DTYPES)} "
                    "(it has no bf16 kernels); choose one of these"
                )
        if self.backend not in BACKENDS:
            raise UsageError(f"--backend {self.backend}: expected {', '.join(BACKENDS)}")
        self._check_quantization()

    def _check_quantization(self) -> None:
        for option, quantize, dtype in (
            ("--quantize", self.quantize, self.dtype),
            ("--draft-quantize", self.draft_quantize, self.draft_dtype or self.dtype),
        ):
            if quantize not in ("none", *QUANTIZATIONS):
                raise UsageError(f"{option} {quantize}: expected none, {', '.join(QUANTIZATIONS)}")
            if quantize != "none" and dtype != "fp32":
                raise UsageError(f"{option} {quantize}: its activations are fp32, got {dtype}; leave the dtype out")
        name, _, quantize = self.draft.partition(":")
        if name == "self" and quantize:
            if quantize not in QUANTIZATIONS:
                raise UsageError(
                    f"--draft {self.draft}: expected self, {', '.join('self:' + q for q in QUANTIZATIONS)}"
                )
            if self.draft_quantize not in ("none", quantize):
                raise UsageError(f"--draft {self.draft}: got --draft-quantize {self.draft_quantize} too; leave one out")
            object.__setattr__(self, "draft_quantize", quantize)
        elif self.draft in MODEL_FREE_DRAFTS and self.draft_quantize != "none":
            raise UsageError(f"--draft-quantize {self.draft_quantize}: draft {self.draft} has no weights of its own")
