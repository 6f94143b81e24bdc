"""The models that an export writes, derived from configs alone, and the disk and memory that they need."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import psutil

from specrt.engines.contract import ITEM_BYTES, ONNXRUNTIME_DIALECT, STANDARD_DIALECTS, ModelSpec
from specrt.engines.errors import UsageError
from specrt.engines.progress import Progress
from specrt.exporter.bundle import check_disk
from specrt.exporter.heads.taps import check_taps
from specrt.exporter.options import DEFAULT_MAX_SEQ_LEN, ExportOptions
from specrt.exporter.quantization.blocks import QUANTIZATIONS
from specrt.exporter.quantization.qdq import LAYOUTS
from specrt.exporter.sources.source import Source
from specrt.exporter.tracing.observe import Observation, observe


@dataclass(frozen=True)
class ModelPlan:
    """One model to export: its source, its role in the bundle and its derived spec.

    ``block_size`` of quantized matmuls is None for the default. ``num_layers`` is set for a draft that is this number
    of the target's layers and uses their weights. ``taps`` are the hidden states that a target writes as they are,
    without a head.
    """

    role: str
    source: Source
    observation: Observation
    spec: ModelSpec
    quantization: str
    block_size: int | None = None
    num_layers: int | None = None
    taps: tuple[int, ...] = ()

    @property
    def graph(self) -> str:
        """The graph's path in the bundle. A graph that uses the target's weights is in the same folder."""
        return f"{self.role}/model.onnx" if self.num_layers is None else "target/skip.onnx"

    @property
    def weights_bytes(self) -> int:
        """Bytes of the loaded model. A bf16 model is compared in fp32."""
        item_bytes = 4 if self.spec.dtype == "bfloat16" else ITEM_BYTES[self.spec.dtype]
        return self.observation.num_parameters * item_bytes

    @property
    def written_bytes(self) -> int:
        if self.num_layers is not None:
            return 0
        if self.quantization == "none":
            fp32_copy_bytes = self.weights_bytes if self.spec.dtype == "bfloat16" else 0
            return self.observation.num_parameters * ITEM_BYTES[self.spec.dtype] + fp32_copy_bytes
        rows = LAYOUTS if self.spec.dialect in STANDARD_DIALECTS else QUANTIZATIONS
        return int(
            self.observation.num_parameters * rows[self.quantization].bytes_per_weight(ITEM_BYTES[self.spec.dtype])
        )

    def with_layers(self, kept: tuple[int, ...]) -> ModelPlan:
        """The plan once the kept layers are known."""
        layers = tuple(self.observation.kv_layers[index] for index in kept)
        return replace(self, spec=replace(self.spec, kv_layers=layers))


def plan_model(role: str, source: Source, options: ExportOptions) -> ModelPlan:
    """The plan of ``target`` or ``draft``. Raises ``UsageError`` for options that do not fit the model."""
    observation = observe(source.config, options.trust_remote_code)
    longest = observation.max_position_embeddings
    wanted = options.max_seq_len or DEFAULT_MAX_SEQ_LEN
    if role == "target" and options.max_seq_len and longest and options.max_seq_len > longest:
        raise UsageError(
            f"--max-seq-len {options.max_seq_len}: expected at most {longest}, the context of {source.name}"
        )
    max_seq_len = min(wanted, longest) if longest else wanted
    k = options.num_speculative_tokens
    spec = ModelSpec(
        vocab_size=observation.vocab_size,
        max_seq_len=max_seq_len,
        capacity=max_seq_len + k,
        max_width=min(options.prefill_chunk, max_seq_len),
        max_rows=k + 1,
        dtype=options.dtype_of(role),
        kv_layers=observation.kv_layers,
        dialect=options.dialect,
    )
    has_target_weights = role == "target" or options.num_draft_layers is not None
    quantize = options.quantize if has_target_weights else options.draft_quantize
    check_experts(source.name, observation, spec.dialect, quantize)
    if quantize != "none" and observation.experts and (spec.dialect, spec.dtype) == (ONNXRUNTIME_DIALECT, "float16"):
        raise UsageError(
            f"--quantize {quantize}: {source.name} is a mixture of experts, whose kernels for CUDA store weights in "
            "another layout; leave --quantize or --dtype fp16 out"
        )
    if role == "target":
        if options.feature_taps:
            check_taps("feature_taps", options.feature_taps, len(observation.kv_layers))
            size = len(options.feature_taps) * source.config.get_text_config().hidden_size
            spec = replace(spec, feature_size=size)
        return ModelPlan(
            role, source, observation, spec, options.quantize, options.block_size, taps=options.feature_taps
        )
    spec = _with_head_of(spec, options.draft_vocab)
    num_layers = options.num_draft_layers
    if num_layers is None:
        return ModelPlan(role, source, observation, spec, options.draft_quantize, options.block_size)
    if num_layers >= len(observation.kv_layers):
        raise UsageError(f"--draft {options.draft}: the target has {len(observation.kv_layers)} layers; keep fewer")
    plan = ModelPlan(role, source, observation, spec, options.quantize, options.block_size, num_layers)
    return plan.with_layers(tuple(range(num_layers)))


def check_experts(name: str, observation: Observation, dialect: str, quantization: str) -> None:
    """Raise ``UsageError`` where experts, most of a model's weights, would stay unquantized."""
    if quantization != "none" and reads_all_experts(observation, dialect):
        reason = "for TensorRT" if dialect in STANDARD_DIALECTS else "that are not down(silu(gate) * up)"
        raise UsageError(
            f"--quantize {quantization}: {name} is a mixture of experts, and experts {reason} are stored unquantized; "
            "leave --quantize out"
        )


def reads_all_experts(observation: Observation, dialect: str) -> bool:
    """Whether every pass reads and computes all experts of some layer, not only those that its tokens are routed to."""
    is_sparse = dialect == ONNXRUNTIME_DIALECT and all(site.is_sparse for site in observation.experts)
    return bool(observation.experts) and not is_sparse


def _with_head_of(spec: ModelSpec, num_ids: int | None) -> ModelSpec:
    """``spec`` with logits of the first ``num_ids`` ids only."""
    if num_ids is None:
        return spec
    if num_ids >= spec.vocab_size:
        raise UsageError(f"--draft-vocab {num_ids}: expected fewer than the draft's {spec.vocab_size} ids")
    return replace(spec, vocab_size=num_ids, num_input_ids=spec.vocab_size)


class Further(Protocol):
    """What an export writes in addition to models: a head."""

    @property
    def weights_bytes(self) -> int: ...

    @property
    def written_bytes(self) -> int: ...

    @property
    def slot_bytes(self) -> int: ...


def check_resources(plans: list[ModelPlan], output: Path, progress: Progress, head: Further | None = None) -> None:
    """Report the disk and memory that the export needs. Raises ``ResourceError`` when the disk is too full."""
    weights = sum(plan.written_bytes for plan in plans) + (head.written_bytes if head else 0)
    kv = sum(plan.spec.kv_bytes for plan in plans) + (head.slot_bytes if head else 0)
    disk = int(weights * 1.05) + (64 << 20)
    loaded = max(plan.weights_bytes for plan in plans) + (2 * head.weights_bytes if head else 0)
    memory = int(loaded * 1.3) + (1 << 30)  # 1.26 measured on 7.1 GB
    progress.note(
        f"needs about {disk / 1e9:.2f} GB of disk and {memory / 1e9:.2f} GB of memory; "
        f"a sequence of the bundle will take {kv / 1e6:.0f} MB of KV"
    )
    for plan in plans:
        if reads_all_experts(plan.observation, plan.spec.dialect):
            chosen, count = plan.observation.experts[0].experts_per_token, plan.observation.experts[0].num_experts
            progress.note(
                f"{plan.role}: every pass computes all {count} experts of a layer, not the {chosen} of a token"
            )
    available = psutil.virtual_memory().available
    if available < memory:
        progress.note(f"only {available / 1e9:.2f} GB of memory are available: this may swap or be killed")
    check_disk(output, disk)
