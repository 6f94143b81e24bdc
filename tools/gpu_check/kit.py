"""The kit of ``specrt gpu-check``: small seeded bundles in one archive. ``specrt.tools.gpu_check.make`` writes it.

::

    standard/       a tiny pair for TensorRT and TensorRT-RTX in fp16, with TensorRT-RTX's engines
    standard_22/    the same pair for TensorRT 10.3 to 10.14 (Jetson), without engines
    onnxruntime/    the same pair for ONNX Runtime in fp16
    attention/      one layer with 12 query and 2 KV heads of 128, by form and context, as in ``operator-2048``, with
                    TensorRT-RTX's engine of the target
    layers/         two layers of a 1.5B model's shape; their weights are made from a seed where they are needed
"""

from __future__ import annotations

import os
import shutil
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specrt.engines.contract import ONNXRUNTIME_DIALECT
from specrt.engines.errors import UsageError, one_line
from specrt.engines.manifest import MANIFEST_NAME, manifest_from_bundle

STANDARD, STANDARD_22, ONNXRUNTIME, ATTENTION, LAYERS = "standard", "standard_22", "onnxruntime", "attention", "layers"
KIT_NAME = "gpu-kit"
KIT_FILE = f"{KIT_NAME}.tar.gz"
_SEEDED_BYTES = 16 << 20


@dataclass(frozen=True)
class Kit:
    """Paths of the bundles that are there. ``attention`` has them by ``FORM-CONTEXT``."""

    standard: Path | None = None
    standard_22: Path | None = None
    onnxruntime: Path | None = None
    attention: dict[str, Path] = field(default_factory=dict)
    layers: Path | None = None


def kit_in(path: Path) -> Kit:
    """The kit in the folder ``path``, or the bundle at ``path`` as a kit of one. Raises ``UsageError`` for neither."""
    if (path / MANIFEST_NAME).is_file():
        is_plain = manifest_from_bundle(path).target.spec.dialect == ONNXRUNTIME_DIALECT
        return Kit(onnxruntime=path) if is_plain else Kit(standard=path)

    def part(name: str) -> Path | None:
        return path / name if (path / name / MANIFEST_NAME).is_file() else None

    forms = sorted((path / ATTENTION).glob(f"*/{MANIFEST_NAME}"))
    attention = {form.parent.name: form.parent for form in forms}
    kit = Kit(part(STANDARD), part(STANDARD_22), part(ONNXRUNTIME), attention, part(LAYERS))
    if kit == Kit():
        raise UsageError(f"{path}: no bundle and no kit is there; make a kit with 'make gpu-kit', or name a bundle")
    return kit


def unpacked(path: Path, work: Path) -> Path:
    """The kit or bundle at ``path`` in a folder below ``work``, where it may be changed.

    Files of a folder are hard links where the disk allows it. Raises ``UsageError`` for a file that is no kit.
    """
    if not path.exists():
        raise UsageError(f"{path}: not found; make a kit with 'make gpu-kit', or name a kit or a bundle")
    if path.is_dir():
        return Path(shutil.copytree(path, work / KIT_NAME, copy_function=_link))
    try:
        with tarfile.open(path) as archive:
            members = archive.getmembers()
            if strange := next((member.name for member in members if not _is_plain(member)), None):
                raise tarfile.TarError(f"it has {strange!r}, expected files and folders below its own")
            options: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # not in 3.11.2
            archive.extractall(work, members, **options)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UsageError(f"{path}: not a kit ({one_line(error)}); make one with 'make gpu-kit'") from error
    return work / KIT_NAME


def _is_plain(member: tarfile.TarInfo) -> bool:
    parts = Path(member.name).parts
    return (member.isfile() or member.isdir()) and parts[:1] == (KIT_NAME,) and ".." not in parts


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def write_seeded(path: Path, num_bytes: int) -> None:
    """Write fp16 weights between -0.03 and 0.03 from a fixed seed, ``num_bytes`` of them."""
    rng = np.random.default_rng(7)
    block = rng.uniform(-0.03, 0.03, _SEEDED_BYTES // 2).astype(np.float32).astype("<f2").tobytes()
    with path.open("wb") as file:
        for start in range(0, num_bytes, len(block)):
            file.write(block[: num_bytes - start])


def fill(bundle: Path) -> None:
    """Write the weights of a bundle that was stored without them."""
    manifest = manifest_from_bundle(bundle)
    weights = manifest.target.weights[0]
    if weights is not None and not (bundle / weights).exists():
        write_seeded(bundle / weights, manifest.files[weights].num_bytes)
