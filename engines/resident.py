"""Memory of a bundle's weights while it runs, for each backend, in addition to the buffers listed by ``plan``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specrt.engines.buffers import allocated_bytes, plan_slot
from specrt.engines.manifest import Manifest, ModelEntry
from specrt.engines.trt.library import LIBRARIES
from specrt.engines.trt.record import BuildRecord

# ONNX Runtime's CPU provider computes in fp32: it widens weights in fp16 when it loads them.
_WIDENED = {"float32": 1, "float16": 2}


@dataclass(frozen=True)
class ResidentMemory:
    """Bytes of a bundle on one backend.

    ``slot_bytes``: the buffers of one sequence with its draft. ``private_bytes``: weights in private memory of the
    process or on the GPU; None for engines that are not built. ``mapped_bytes``: weights in memory-mapped files, whose
    pages are loaded when read and can be evicted by the system. Code of libraries is not counted.
    """

    backend: str
    slot_bytes: int
    private_bytes: int | None
    mapped_bytes: int


def resident_memory(manifest: Manifest, builds: Sequence[BuildRecord] = ()) -> tuple[ResidentMemory, ...]:
    """A row for each backend of the bundle. ``builds`` are the records of its engines."""
    models = [entry for entry in (manifest.target, manifest.draft.model) if entry is not None]
    engines = {record.backend: record for record in builds}
    rows = []
    for backend in manifest.backends:
        slot_bytes = allocated_bytes(plan_slot(manifest, backend))
        if backend in LIBRARIES:
            record = engines.get(backend)
            private = sum(engine.num_bytes for engine in record.engines.values()) if record else None
            rows.append(ResidentMemory(backend, slot_bytes, private, 0))
        else:
            rows.append(ResidentMemory(backend, slot_bytes, *_on_cpu(manifest, models)))
    return tuple(rows)


def _on_cpu(manifest: Manifest, models: Sequence[ModelEntry]) -> tuple[int, int]:
    """(private, mapped). Weights that a pass reads are copied once, into the kernel's layout; files stay mapped."""
    private = sum(model.bytes_per_pass * _WIDENED[model.spec.dtype] for model in models)
    files = {name for model in models for name in model.weights if name in manifest.files}  # drafts share some
    return private, sum(manifest.files[name].num_bytes for name in files)
