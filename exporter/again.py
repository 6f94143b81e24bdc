"""The options that export the target of a bundle again, graph for graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir

from specrt.engines.contract import STANDARD_DIALECTS
from specrt.engines.dialects import oldest_version
from specrt.engines.manifest import manifest_from_bundle
from specrt.exporter.options import DTYPES, ExportOptions
from specrt.exporter.quantization.blocks import block_size_of


def options_again(bundle: Path, output: Path, **others: Any) -> ExportOptions:
    """Options whose export to ``output`` has the target's graph of ``bundle``; ``others`` are those of the draft.

    The device is not among them: it is a default and a check of the dtype, which is given. Raises ``BundleError``.
    """
    manifest = manifest_from_bundle(bundle)
    entry, backend, k = manifest.target, manifest.backends[0], manifest.num_speculative_tokens
    spec, adapter = entry.spec, entry.adapter
    return ExportOptions(
        target=entry.source,
        output=output,
        num_speculative_tokens=k,
        max_seq_len=spec.max_seq_len,
        prefill_chunk=max(spec.max_width, k + 2),  # the width of a shorter context is the context
        dtype=next(name for name, dtype in DTYPES.items() if dtype == spec.dtype),
        quantize=entry.quantization,
        block_size=block_size_of(ir.load(bundle / entry.graph)) if spec.dialect not in STANDARD_DIALECTS else None,
        backend=backend,
        tensorrt_version=oldest_version(spec.dialect) if backend == "tensorrt" else None,
        revision=_revision(entry.source, entry.revision),
        adapter=None if adapter is None else adapter.source,
        adapter_revision=None if adapter is None else _revision(adapter.source, adapter.revision),
        no_adapter=adapter is None,
        **others,
    )


def _revision(name: str, commit: str | None) -> str | None:
    """The revision of a hub id. A folder in the hub's cache has its commit in its path."""
    return None if Path(name).expanduser().exists() else commit
