"""The head of ``specrt export --draft eagle3:HEAD``, before any weight of the target is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specrt.engines.contract import ITEM_BYTES, STANDARD_DIALECTS, ModelSpec
from specrt.engines.errors import UsageError
from specrt.engines.progress import Progress
from specrt.exporter.heads.config import FcNorm
from specrt.exporter.heads.files import LoadedHead, head_from_folder
from specrt.exporter.heads.graph import kv_layer_of
from specrt.exporter.heads.tensors import stored_norms
from specrt.exporter.options import ExportOptions
from specrt.exporter.planning import ModelPlan
from specrt.exporter.quantization.blocks import QUANTIZATIONS
from specrt.exporter.quantization.qdq import LAYOUTS

_FC_NORMS: dict[str, FcNorm] = {"none": "none", "fc": "whole", "fc-each": "each"}


@dataclass(frozen=True)
class HeadPlan:
    """A head to export for a target. ``is_named``: the options name the variant that ``loaded`` states."""

    source: str
    revision: str | None
    loaded: LoadedHead
    spec: ModelSpec
    quantization: str
    target_quantization: str
    is_named: bool
    block_size: int | None = None

    @property
    def weights_bytes(self) -> int:
        """Bytes of the loaded head."""
        return sum(tensor.numel() for tensor in self.loaded.tensors.values()) * 4

    @property
    def written_bytes(self) -> int:
        """The bytes that it adds to the bundle at most."""
        num_weights = sum(tensor.numel() for tensor in self.loaded.tensors.values())
        if self.quantization == "none":
            return num_weights * ITEM_BYTES[self.spec.dtype]
        rows = LAYOUTS if self.spec.dialect in STANDARD_DIALECTS else QUANTIZATIONS
        return int(num_weights * rows[self.quantization].bytes_per_weight(ITEM_BYTES[self.spec.dtype]))

    @property
    def slot_bytes(self) -> int:
        """Bytes of its KV and of its features for one sequence."""
        assert self.spec.feature_size is not None
        return self.spec.kv_bytes + self.spec.feature_slots * self.spec.feature_size * ITEM_BYTES[self.spec.dtype]


def plan_head(options: ExportOptions, target: ModelPlan, progress: Progress) -> HeadPlan:
    """The plan of ``options.head`` for ``target``. Raises ``SpecrtError`` for files that are no head of this target."""
    assert options.head is not None
    num_layers = len(target.observation.kv_layers)
    loaded = head_from_folder(
        options.head,
        num_layers,
        target.source.config.get_text_config().hidden_size,
        target.spec.vocab_size,
        options.taps or None,
        options.draft_revision,
    )
    if options.norm:
        loaded = _named(loaded, options.norm)
    for line in loaded.notes:
        progress.note(f"draft: {line}")
    spec = replace(
        target.spec,
        kv_layers=(kv_layer_of(loaded.config),),
        num_input_ids=None,
        feature_size=loaded.config.hidden_size,
        reads_features=True,
    )
    return HeadPlan(
        options.head,
        loaded.revision,
        loaded,
        spec,
        options.draft_quantize,
        target.quantization,
        bool(options.taps or options.norm),
        options.block_size,
    )


def _named(loaded: LoadedHead, norm: Sequence[str]) -> LoadedHead:
    """``loaded`` with exactly the norms of ``norm``. Raises ``UsageError`` for one whose tensors the head lacks."""
    fc_norm: FcNorm = next((_FC_NORMS[word] for word in norm if word in _FC_NORMS), "none")
    stored = stored_norms(loaded.tensors)
    if fc_norm not in ("none", stored):
        raise UsageError(f"--norm {' --norm '.join(norm)}: the head has the tensors of fc_norm {stored}; leave it out")
    variant = replace(
        loaded.stated, fc_norm=fc_norm, norm_before_residual="residual" in norm, norm_output="output" in norm
    )
    return replace(loaded, config=loaded.config.with_variant(variant))
