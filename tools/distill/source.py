"""What ``specrt distill`` is given: a target, or a bundle of one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrt.engines.contract import ONNXRUNTIME_DIALECT
from specrt.engines.errors import UsageError
from specrt.engines.manifest import MANIFEST_NAME, Manifest, manifest_from_bundle

if TYPE_CHECKING:
    from specrt.exporter.options import ExportOptions


@dataclass(frozen=True)
class Source:
    """What the text is written by: the target's name for the export, and its bundle if one was given."""

    name: str
    revision: str | None = None
    bundle: Path | None = None
    manifest: Manifest | None = None
    trust_remote_code: bool = False

    @property
    def quantization(self) -> str:
        """Of the weights: ``none`` without a bundle."""
        return "none" if self.manifest is None else self.manifest.target.quantization

    def options(self, output: Path, **others: Any) -> ExportOptions:
        """Export the target to ``output`` as it is in the bundle, by default without one; with ``others``."""
        from specrt.exporter.again import options_again
        from specrt.exporter.options import ExportOptions

        others |= {"trust_remote_code": self.trust_remote_code, "force": True}
        if self.bundle is not None:
            return options_again(self.bundle, output, **others)
        return ExportOptions(self.name, output, revision=self.revision, **others)


def source_of(name: str, trust_remote_code: bool = False) -> Source:
    """The target of a bundle or of a source. Raises ``BundleError``, and ``UsageError`` for a bundle of TensorRT."""
    folder = Path(name)
    if not (folder / MANIFEST_NAME).is_file():
        return Source(name, trust_remote_code=trust_remote_code)
    manifest = manifest_from_bundle(folder)
    entry = manifest.target
    if entry.spec.dialect != ONNXRUNTIME_DIALECT:
        raise UsageError(
            f"{name}: got a bundle for {manifest.backends[0]}, expected one for onnxruntime, which writes the text; "
            f"give {entry.source}, and export the draft with --backend {manifest.backends[0]} afterwards"
        )
    return Source(entry.source, entry.revision, folder, manifest, trust_remote_code)
