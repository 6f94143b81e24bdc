"""What a service is opened from: a value that can be sent to another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specrt.engines.manifest import manifest_from_bundle
from specrt.engines.progress import SILENT, Progress
from specrt.engines.storage.integrity import check_files
from specrt.serving.defaults import AUTO, sampling_defaults
from specrt.serving.protocol.requests import Defaults
from specrt.serving.service import Config, Limits, Service, open_service


@dataclass(frozen=True)
class Source:
    """A bundle and how to serve it. ``place`` are arguments of ``specrt.load``; ``reproducible`` None: where needed."""

    bundle: Path
    config: Config
    reproducible: bool | None = None
    place: Mapping[str, Any] = field(default_factory=dict)

    def open(self, progress: Progress = SILENT) -> Service:
        """Check the bundle's files, load it and warm it up. Raises ``BundleError`` and ``BackendError``."""
        check_files(self.bundle, manifest_from_bundle(self.bundle), progress=progress)
        return open_service(self.bundle, self.config, self.reproducible, self.place, progress)


def config_from_bundle(
    bundle: Path, names: Sequence[str], limits: Limits, generation_config: str = AUTO, **others: Any
) -> Config:
    """The configuration to serve ``bundle``, without ``names`` under that of its folder and of its target.

    Raises ``BundleError``, and ``UsageError`` as ``sampling_defaults`` does.
    """
    manifest = manifest_from_bundle(bundle)
    names = tuple(names) or (bundle.resolve().name, manifest.target.source)
    return Config(names, limits, Defaults(sampling_defaults(generation_config, manifest)), **others)
